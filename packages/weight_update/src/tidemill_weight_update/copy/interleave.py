"""The order of copies whose sources are on several GPUs. Pure, numpy only."""

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from tidemill_weight_update.copy.table import COLUMNS, CopyTable

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
