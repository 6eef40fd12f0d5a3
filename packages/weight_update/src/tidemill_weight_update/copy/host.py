"""Executes copy tables on host memory, with torch's own views and copies."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from tidemill_weight_update.copy.checksum import checksum_rows
from tidemill_weight_update.copy.checksum import non_finite as count_non_finite
from tidemill_weight_update.copy.table import CopyTable

CACHED_RUNS = 2
"""Sets of memories whose views are kept: the two slots of a double buffer."""


@dataclass(frozen=True, slots=True)
class _Rows:
    """One row of a table as views: `source` and `target` are [R, C]."""

    tensor: int
    source: Tensor
    target: Tensor
    pos: int
    pos_pitch: int


class HostCopier:
    """Runs the same copies again and again, from memories that may change between runs into fixed targets.

    Args:
        tables: what to copy; see `CopyTable`.
        targets: what the tables' `target` columns index, in host memory. Offsets count elements of the table's
            `dst_dtype` from the first byte of a target, whatever the target's own dtype and shape.
        checksum_of: which elements `run` checksums and counts: those read, or those written (after the cast, if any).
    """

    def __init__(
        self,
        tables: Sequence[CopyTable],
        targets: Sequence[Tensor],
        checksum_of: Literal["source", "target"] = "source",
    ) -> None:
        self._tables = tuple(tables)
        self._targets = tuple(targets)
        self._checksum_of = checksum_of
        self._views: dict[tuple[int, ...], list[_Rows]] = {}

    def run(
        self,
        memories: Sequence[Tensor],
        checksums: Tensor | None = None,
        non_finite: Tensor | None = None,
        write: bool = True,
    ) -> None:
        """Copies, and adds to `checksums` and `non_finite` what was copied.

        Args:
            memories: what the tables' `memory` columns index; offsets count elements of the table's `src_dtype` from
                the first byte of a memory, whatever its own dtype and shape. They must live until `forget` or until
                two runs with other memories.
            checksums: int64 [number of tensors], or None.
            non_finite: int32 [number of tensors], number of elements that are infinite or not a number, or None.
            write: False reads only.

        Raises:
            ValueError: a copy reaches outside a memory or target, or one is not aligned to its dtype.
        """
        for rows in self._rows(memories):
            if write:
                rows.target.copy_(rows.source)
            if checksums is None and non_finite is None:
                continue
            elements = rows.source
            if self._checksum_of == "target":
                elements = rows.target if write else rows.source.to(rows.target.dtype)
            if checksums is not None:
                checksums[rows.tensor] += checksum_rows(elements, rows.pos, rows.pos_pitch)
            if non_finite is not None:
                non_finite[rows.tensor] += count_non_finite(elements)

    def forget(self) -> None:
        """Drops the views of all memories, so that they can be freed or unmapped."""
        self._views.clear()

    def _rows(self, memories: Sequence[Tensor]) -> list[_Rows]:
        key = tuple(memory.data_ptr() for memory in memories)
        rows = self._views.pop(key, None)
        if rows is None:
            rows = [row for table in self._tables for row in _views(table, memories, self._targets)]
        self._views[key] = rows  # now the most recent one
        while len(self._views) > CACHED_RUNS:
            del self._views[next(iter(self._views))]
        return rows


def _views(table: CopyTable, memories: Sequence[Tensor], targets: Sequence[Tensor]) -> list[_Rows]:
    # Of other dtypes, which come in tables of their own, some need not be at multiples of this one's size.
    sources = {i: _elements(memories[i], table.src_dtype, f"memory {i}") for i in set(table.memory.tolist())}
    places = {i: _elements(targets[i], table.dst_dtype, f"target {i}") for i in set(table.target.tolist())}
    columns = (
        *(table.tensor, table.rows, table.cols),
        *(table.memory, table.src, table.src_pitch),
        *(table.target, table.dst, table.dst_pitch),
        *(table.pos, table.pos_pitch),
    )
    views = []
    for row in zip(*(column.tolist() for column in columns), strict=True):
        tensor, rows, cols, memory, src, src_pitch, target, dst, dst_pitch, pos, pos_pitch = row
        source = _strided(sources[memory], rows, cols, src, src_pitch, f"memory {memory}")
        place = _strided(places[target], rows, cols, dst, dst_pitch, f"target {target}")
        views.append(_Rows(tensor=tensor, source=source, target=place, pos=pos, pos_pitch=pos_pitch))
    return views


def _elements(tensor: Tensor, dtype: torch.dtype, name: str) -> Tensor:
    """The memory from the first byte of `tensor` to the end of its storage, as a flat tensor of `dtype`."""
    start = tensor.storage_offset() * tensor.element_size()
    if tensor.device.type != "cpu":
        raise ValueError(f"{name} is on {tensor.device}, expected host memory; use CudaCopier for GPU memory")
    if start % dtype.itemsize:
        raise ValueError(
            f"{name} starts at byte {start} of its storage, not at a multiple of the {dtype.itemsize} bytes of {dtype}"
        )
    num_elements = (tensor.untyped_storage().nbytes() - start) // dtype.itemsize
    whole = torch.empty(0, dtype=dtype, device="cpu")
    return whole.set_(tensor.detach().untyped_storage(), start // dtype.itemsize, (num_elements,), (1,))


def _strided(elements: Tensor, rows: int, cols: int, offset: int, pitch: int, name: str) -> Tensor:
    end = offset + max(rows - 1, 0) * pitch + cols
    if offset < 0 or pitch < 0 or end > elements.numel():
        raise ValueError(
            f"a copy reaches elements {offset} to {end} of {name}, which holds {elements.numel()} of {elements.dtype}; "
            f"was the plan recorded for other parameters?"
        )
    return elements.as_strided((rows, cols), (pitch, 1), elements.storage_offset() + offset)
