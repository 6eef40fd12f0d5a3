"""Copy tables: a plan and the places of the shards, flattened to rows for one kernel launch. Pure, numpy only."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields

import numpy as np
import torch
from numpy.typing import NDArray

from tidemill_weight_update.tensors import Box, SourceSpec, contiguous_strides

ALIGNMENT = 64
"""Every tensor starts at a multiple of this many bytes, so that views of any dtype are valid and copies are
vectorized.
"""


def aligned(offset: int) -> int:
    """Return the smallest multiple of ALIGNMENT that is at least `offset`."""
    return -(-offset // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True, slots=True)
class Copy:
    """A copy of a box of source `name` into `parameter`, cast to the parameter's dtype `dtype`.

    Element `(i_0, i_1, ...)` of the source, with `i` in `box`, is copied to element `offset + sum((i_d - box.start[d])
    * strides[d])` of the parameter, relative to `data_ptr()`. The stride of a dim of size 1 is 0.
    """

    name: str
    box: Box
    parameter: str
    offset: int
    strides: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Shard:
    """A box of a global tensor and the place of its values.

    Element `i` of the global tensor, with `i` in `box`, is element `offset + sum((i_d - box.start[d]) * strides[d])` of
    memory block `memory`; offset and strides are in elements of the sent dtype.
    """

    box: Box
    memory: int
    offset: int
    strides: tuple[int, ...]


def in_a_row(boxes: Iterable[tuple[Box, int]]) -> tuple[list[Shard], int]:
    """Place boxes, each with its element size, one after the other in memory 0; return the places and the bytes."""
    shards, end = [], 0
    for box, itemsize in boxes:
        start = aligned(end)
        shards.append(Shard(box, 0, start // itemsize, contiguous_strides(box.shape)))
        end = start + box.numel * itemsize
    return shards, end


@dataclass(frozen=True, slots=True, eq=False)
class CopyTable:
    """Two-dimensional copies, one per entry of the columns. All counts are in elements.

    Attributes:
        src_dtype: sent dtype of all copies in the table.
        dst_dtype: dtype of the parameters of all copies in the table.
        tensor: index of the source tensor, for checksums.
        memory, src, src_pitch: index of the memory block, first element, elements between rows.
        target, dst, dst_pitch: index of the parameter, first element, elements between rows.
        rows, cols: size; a row is contiguous in the source, in the parameter and in the global tensor.
        pos, pos_pitch: position of the first element in the flattened global tensor, and between rows.
    """

    src_dtype: torch.dtype
    dst_dtype: torch.dtype
    tensor: NDArray[np.int32]
    memory: NDArray[np.int32]
    src: NDArray[np.int64]
    src_pitch: NDArray[np.int64]
    target: NDArray[np.int32]
    dst: NDArray[np.int64]
    dst_pitch: NDArray[np.int64]
    rows: NDArray[np.int64]
    cols: NDArray[np.int64]
    pos: NDArray[np.int64]
    pos_pitch: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.tensor)


COLUMNS = tuple(item.name for item in fields(CopyTable) if not item.name.endswith("dtype"))
"""Names of a table's columns. The copiers read them by this order."""


def build_tables(
    copies: Sequence[Copy], sources: Sequence[SourceSpec], shards: Mapping[str, Sequence[Shard]], targets: Sequence[str]
) -> tuple[CopyTable, ...]:
    """Return the tables that execute `copies`, one per pair of dtypes, in the order in which the pairs first appear.

    Args:
        sources: all tensors that are sent; a table's `tensor` is an index into this.
        shards: source name -> disjoint shards; what they do not contain is not copied. Pass one of several replicas.
        targets: names of parameters; a table's `target` is an index into this.
    """
    index_of = {spec.name: index for index, spec in enumerate(sources)}
    target_of = {name: index for index, name in enumerate(targets)}
    grouped: dict[tuple[torch.dtype, torch.dtype], list[Copy]] = {}
    for copy in copies:
        grouped.setdefault((sources[index_of[copy.name]].dtype, copy.dtype), []).append(copy)
    return tuple(
        _table(dtypes, group, [sources[index_of[copy.name]] for copy in group], index_of, shards, target_of)
        for dtypes, group in grouped.items()
    )


def _table(
    dtypes: tuple[torch.dtype, torch.dtype],
    copies: Sequence[Copy],
    specs: Sequence[SourceSpec],
    index_of: Mapping[str, int],
    shards: Mapping[str, Sequence[Shard]],
    target_of: Mapping[str, int],
) -> CopyTable:
    held = [shards.get(copy.name, ()) for copy in copies]
    pair = np.repeat(np.arange(len(copies)), [len(group) for group in held])
    shape, first, steps = _overlaps(copies, specs, held, pair)
    kept = np.flatnonzero(shape.prod(axis=1))
    entry, first, pitch, rows, cols = _to_rows(shape[kept], first[:, kept], steps[:, kept])
    entry = kept[entry]
    return CopyTable(
        *dtypes,
        tensor=np.array([index_of[copy.name] for copy in copies], np.int32)[pair[entry]],
        memory=np.array([shard.memory for group in held for shard in group], np.int32)[entry],
        src=first[0],
        src_pitch=pitch[0],
        target=np.array([target_of[copy.parameter] for copy in copies], np.int32)[pair[entry]],
        dst=first[1],
        dst_pitch=pitch[1],
        rows=rows,
        cols=cols,
        pos=first[2],
        pos_pitch=pitch[2],
    )


def _overlaps(
    copies: Sequence[Copy], specs: Sequence[SourceSpec], held: Sequence[Sequence[Shard]], pair: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Return the overlap of each copy with each shard of its source; `pair` [n] is the index of the copy.

    Returns:
        shape: shape of the common box [n, num_dims], with a 0 where there is none.
        first, steps: its first element [3, n] and the elements between neighbours along each dim [3, n, num_dims], in
        the shard's memory, in the parameter, and in the flattened source.
    """
    num_dims = max((len(spec.shape) for spec in specs), default=0)
    flat = [shard for group in held for shard in group]

    def matrix(rows: Sequence[tuple[int, ...]], pad: int) -> NDArray[np.int64]:  # [len(rows), num_dims]
        padded = [(pad,) * (num_dims - len(row)) + row for row in rows]
        return np.array(padded, dtype=np.int64).reshape(len(rows), num_dims)

    copy_start = matrix([copy.box.start for copy in copies], 0)[pair]
    shard_start = matrix([shard.box.start for shard in flat], 0)
    start = np.maximum(copy_start, shard_start)
    end = np.minimum(
        copy_start + matrix([copy.box.shape for copy in copies], 1)[pair],
        shard_start + matrix([shard.box.shape for shard in flat], 1),
    )
    steps = np.stack(
        [
            matrix([shard.strides for shard in flat], 0),
            matrix([copy.strides for copy in copies], 0)[pair],
            matrix([contiguous_strides(spec.shape) for spec in specs], 0)[pair],
        ]
    )
    first = (np.stack([start - shard_start, start - copy_start, start]) * steps).sum(axis=2)
    first[0] += np.array([shard.offset for shard in flat], np.int64)
    first[1] += np.array([copy.offset for copy in copies], np.int64)[pair]
    return np.maximum(end - start, 0), first, steps


def _to_rows(
    shape: NDArray[np.int64], first: NDArray[np.int64], steps: NDArray[np.int64]
) -> tuple[NDArray[np.int64], ...]:
    """Convert boxes to two-dimensional copies.

    Args:
        shape: [n, num_dims], no zeros.
        first: [3, n] first elements in source, parameter and position.
        steps: [3, n, num_dims] elements between neighbours.

    Returns:
        The box of each copy, its first elements [3, m], pitches [3, m], rows and cols [m].
    """
    n, num_dims = shape.shape
    at = np.arange(n)
    # Join dims that are one run in source, parameter and position; slot 0 is the innermost.
    sizes = np.ones((n, num_dims + 2), np.int64)
    strides = np.ones((3, n, num_dims + 2), np.int64)
    top = np.zeros(n, np.int64)
    for dim in reversed(range(num_dims)):
        size, step = shape[:, dim], steps[:, :, dim]
        joins = (step == strides[:, at, top] * sizes[at, top]).all(axis=0)
        new = ~joins & (size > 1)
        top += new
        sizes[at, top] *= np.where(joins | new, size, 1)
        strides[:, at[new], top[new]] = step[:, new]
    # The longest of the other dims becomes the rows; the rest are enumerated.
    longest = 1 + np.argmax(sizes[:, 1:], axis=1)
    rows = sizes[at, longest]
    pitch = np.where(rows > 1, strides[:, at, longest], 0)
    others = sizes.copy()
    others[:, 0] = 1
    others[at, longest] = 1
    counts = others.prod(axis=1)
    entry = np.repeat(at, counts)
    left = np.arange(len(entry)) - np.repeat(counts.cumsum() - counts, counts)
    first = first[:, entry]
    for slot in range(1, num_dims + 1):
        left, index = np.divmod(left, others[entry, slot])
        first = first + index * strides[:, entry, slot]
    return entry, first, pitch[:, entry], rows[entry], sizes[entry, 0]
