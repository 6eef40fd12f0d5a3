"""Tiles: copy tables split into pieces of one size for a GPU's thread blocks, and their order. Pure, numpy only."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from tidemill_weight_update.copy.table import COLUMNS, CopyTable

VECTOR_BYTES = 16
"""Bytes that a GPU thread loads or stores at once if everything is aligned."""

TILE_WIDTHS = (1, 8, 32, 128)
"""Tiles have R x C elements: C is the largest power of two that a tile can hold, divided by one of these, R is the
rest.

Wide tiles need the fewest address computations; narrow ones waste no threads on short rows. The narrowest have rows of
128 bytes, one cache line.
"""

SEGMENT_STRIDE = 16
"""Distance between segments in numbers: 128 bytes, one cache line."""


@dataclass(frozen=True, slots=True, eq=False)
class TileGroup:
    """Copies that one kernel launch executes.

    Attributes:
        src_dtype, dst_dtype: dtypes of the table.
        packed: elements per number that a thread processes: 4-byte words with one or more whole elements if nothing is
            cast and everything is aligned (an 8-byte element is two words), else 1.
        unit: src, src_pitch, dst, dst_pitch and cols are in units of this many numbers; 1 if the group is not aligned.
            pos and pos_pitch are always in numbers.
        shape: R, C of a tile, in numbers.
        segments: int64 [num_segments, SEGMENT_STRIDE]: COLUMNS of the table, first tile, number of tiles across; the
            kernel reads them by this order.
        tile_segment: int32 [num_blocks], segment of each tile. The tiles of a segment are consecutive, row by
            row.
    """

    src_dtype: torch.dtype
    dst_dtype: torch.dtype
    packed: int
    unit: int
    shape: tuple[int, int]
    segments: NDArray[np.int64]
    tile_segment: NDArray[np.int32]


def cut(
    table: CopyTable, tile_elements: int, memory_aligned: NDArray[np.bool_], target_aligned: NDArray[np.bool_]
) -> list[TileGroup]:
    """Split the copies of a table into tiles.

    Args:
        tile_elements: numbers in a tile, a power of two and at least 32 times the last of TILE_WIDTHS.
        memory_aligned: for each memory, whether its base address is a multiple of VECTOR_BYTES.
    """
    columns = {name: getattr(table, name).astype(np.int64) for name in COLUMNS}
    for pitch in ("src_pitch", "dst_pitch", "pos_pitch"):  # arbitrary for a single row
        columns[pitch] = np.where(columns["rows"] > 1, columns[pitch], 0)
    aligned_bases = memory_aligned[table.memory] & target_aligned[table.target]
    same = table.src_dtype == table.dst_dtype
    numbers = ("src", "src_pitch", "dst", "dst_pitch", "cols", "pos", "pos_pitch")
    if same and table.src_dtype.itemsize == 8:
        for name in numbers:
            columns[name] = columns[name] * 2
    width = min(table.src_dtype.itemsize, 4)
    packed = 4 // width if same else 1
    vector = VECTOR_BYTES // width if same else VECTOR_BYTES // min(width, table.dst_dtype.itemsize)
    aligned = np.logical_and.reduce([aligned_bases, *(columns[name] % vector == 0 for name in numbers)])
    groups = []
    filled = columns["rows"] * columns["cols"] > 0
    for mask, number, unit in ((filled & aligned, packed, vector // packed), (filled & ~aligned, 1, 1)):
        part = {name: column[mask] for name, column in columns.items()}
        for name in ("src", "src_pitch", "dst", "dst_pitch", "cols"):
            part[name] //= number * unit
        for name in ("pos", "pos_pitch"):
            part[name] //= number
        groups += _by_shape(table, part, number, unit, tile_elements)
    return groups


def _by_shape(
    table: CopyTable, part: dict[str, NDArray[np.int64]], packed: int, unit: int, tile_elements: int
) -> list[TileGroup]:
    shapes = [(width, tile_elements // width) for width in TILE_WIDTHS]
    chosen = _fold(part, unit, shapes, _choose(part, unit, shapes))
    groups = []
    for index, shape in enumerate(shapes):
        mask = chosen == index
        if not mask.any():
            continue
        across = -(-part["cols"] * unit // shape[1])
        counts = (-(-part["rows"] // shape[0]) * across)[mask]
        if counts.sum() >= 2**31:
            raise ValueError(
                f"{counts.sum()} tiles exceed the limit of one launch (2**31); reduce bucket_bytes of WeightUpdater"
            )
        columns = [*(part[name][mask] for name in COLUMNS), np.cumsum(counts) - counts, across[mask]]
        segments = np.zeros((len(counts), SEGMENT_STRIDE), np.int64)
        segments[:, : len(columns)] = np.transpose(columns)
        groups.append(
            TileGroup(
                src_dtype=table.src_dtype,
                dst_dtype=table.dst_dtype,
                packed=packed,
                unit=unit,
                shape=shape,
                segments=segments,
                tile_segment=np.repeat(np.arange(len(counts), dtype=np.int32), counts),
            )
        )
    return groups


def _choose(part: dict[str, NDArray[np.int64]], unit: int, shapes: Sequence[tuple[int, int]]) -> NDArray[np.intp]:
    """Return for each copy the index of the widest shape that needs at most 10 % more tiles than the best one."""
    down = [-(-part["rows"] // rows) for rows, _ in shapes]
    right = [-(-part["cols"] * unit // cols) for _, cols in shapes]
    tiles = np.stack([d * r for d, r in zip(down, right, strict=True)])
    return np.argmax(tiles * 10 <= tiles.min(axis=0) * 11, axis=0)


def _fold(
    part: dict[str, NDArray[np.int64]], unit: int, shapes: Sequence[tuple[int, int]], chosen: NDArray[np.intp]
) -> NDArray[np.intp]:
    """Fold single rows to many short ones, in place, where the other copies have short rows; return the new shapes.

    One launch then does them all, in their order. In a model that is split along both dims, whole rows are read from
    this GPU and partial rows from the others. Separate launches take local time + link time; one launch takes the
    maximum.
    """
    others = np.bincount(chosen[chosen > 0], weights=(part["rows"] * part["cols"])[chosen > 0], minlength=len(shapes))
    index = int(others.argmax())
    if index == 0:  # all copies are single rows
        return chosen
    cols = shapes[index][1] // unit
    folded = (chosen == 0) & (part["rows"] == 1) & (part["cols"] % cols == 0)
    part["rows"] = np.where(folded, part["cols"] // cols, part["rows"])
    part["cols"] = np.where(folded, cols, part["cols"])
    for name, pitch in (("src_pitch", cols), ("dst_pitch", cols), ("pos_pitch", cols * unit)):
        part[name] = np.where(folded, pitch, part[name])
    return np.where(folded, index, chosen)


PIECE_ELEMENTS = 1 << 19
"""Size of the pieces. Small compared to the ten million bytes that a GPU has in flight at once, so that all sources are
always among them.
"""

_ROWS = 128
"""A piece has a multiple of this many rows, so that pieces need no more tiles than the whole."""


def interleave(table: CopyTable, origin: NDArray[np.int64]) -> CopyTable:
    """Return the same copies, large ones in pieces, in an order that reads from all origins at an even rate.

    Each origin has its own link, and the links are fastest in parallel. In the order of the layers, a rank would read
    its own memory, then another's, and several ranks would often read from the same GPU.

    Args:
        origin: number of the GPU that holds each memory of the table.
    """
    if len(table) == 0 or len(np.unique(origin[table.memory])) == 1:
        return table
    pieces = _in_pieces(table)
    order = np.argsort(_progress(pieces.rows * pieces.cols, origin[pieces.memory]), kind="stable")
    return replace(pieces, **{name: getattr(pieces, name)[order] for name in COLUMNS})


def _in_pieces(table: CopyTable) -> CopyTable:
    """Split copies of many rows into groups of rows, and single rows into parts."""
    is_row = table.rows == 1
    length = np.where(is_row, table.cols, table.rows)
    rows = np.maximum(PIECE_ELEMENTS // np.maximum(table.cols, 1) // _ROWS, 1) * _ROWS
    step = np.where(is_row, PIECE_ELEMENTS, rows)
    counts = np.maximum(-(-length // step), 1)
    entry = np.repeat(np.arange(len(table)), counts)
    first = (np.arange(len(entry)) - np.repeat(counts.cumsum() - counts, counts)) * step[entry]
    columns = {name: getattr(table, name)[entry] for name in COLUMNS}
    is_row, length = is_row[entry], np.minimum(step[entry], length[entry] - first)
    columns["rows"] = np.where(is_row, 1, length)
    columns["cols"] = np.where(is_row, length, columns["cols"])
    for name in ("src", "dst", "pos"):
        columns[name] = columns[name] + first * np.where(is_row, 1, columns[f"{name}_pitch"])
    return replace(table, **columns)


def _progress(sizes: NDArray[np.int64], origin: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return for each copy the share of its origin's elements that is done when half of the copy is done."""
    progress = np.zeros(len(sizes))
    for one in np.unique(origin):
        own = origin == one
        progress[own] = (sizes[own].cumsum() - sizes[own] / 2) / max(sizes[own].sum(), 1)
    return progress
