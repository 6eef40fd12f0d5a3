"""Copiers: run copy tables on a CPU or a GPU."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from tidemill_weight_update.copy.checksum import checksum_rows, has_non_finite
from tidemill_weight_update.copy.table import COLUMNS, CopyTable

if TYPE_CHECKING:
    from tidemill_weight_update.copy.cuda import CudaCopier

Blocks = Sequence[Tensor] | Sequence[int]
"""Blocks of memory: tensors, or addresses of GPU memory."""


class Copier:
    """Runs copy tables on a device: with torch's views and copies on a CPU, with one kernel on a GPU.

    Args:
        checksum_of: elements that `run` sums and checks: those read ("source"), or those written after a cast
            ("target").
        keeps: whether views of the blocks of the last run are kept for the next one, and with them the blocks.
    """

    def __init__(
        self,
        tables: Sequence[CopyTable],
        device: torch.device,
        checksum_of: Literal["source", "target"] = "source",
        *,
        keeps: bool = False,
    ) -> None:
        self._tables = tables
        self._device = device
        self._checksum_of = checksum_of
        self._keeps = keeps
        self._kept: tuple[list[int], list[_Rows]] | None = None
        self._cuda: CudaCopier | None = None
        if device.type == "cuda":
            from tidemill_weight_update.copy import cuda

            self._cuda = cuda.CudaCopier(tables, device, checksum_of)

    def run(
        self, memories: Blocks, targets: Blocks, checksums: Tensor | None = None, non_finite: Tensor | None = None
    ) -> None:
        """Copy, unless there are no targets. By source, add to `checksums` (int64) and set `non_finite` (int32) to 1.

        On a GPU the work is queued on the current stream.

        Args:
            memories: blocks that the tables' `memory` columns index; tensors may be on another device. Tensors have any
                dtype and shape: offsets in the tables count elements of the tables' dtypes from the first byte.
            targets: blocks that the tables' `target` columns index.
        """
        # On a GPU, copies of memories stay referenced until the kernel is queued: memory is reused in stream order.
        given = [block for block in memories if isinstance(block, Tensor)]
        here = [each if each.device == self._device else each.to(self._device).contiguous() for each in given]
        places = [block for block in targets if isinstance(block, Tensor)]
        bases, ends = ([block.data_ptr() for block in blocks] for blocks in (here, places))
        if self._cuda is not None:
            self._cuda.run(bases or memories, ends or targets, checksums, non_finite)  # type: ignore[arg-type]
            return
        if self._kept is None or self._kept[0] != bases + ends:
            self._kept = bases + ends, [rows for table in self._tables for rows in _views(table, here, places)]
        for rows in self._kept[1]:
            elements = rows.source
            if rows.target is not None:
                rows.target.copy_(elements)
            if self._checksum_of == "target" and (checksums is not None or non_finite is not None):
                elements = elements.to(rows.dtype) if rows.target is None else rows.target
            if checksums is not None:
                checksums[rows.tensor] += checksum_rows(elements, rows.pos, rows.pos_pitch)
            if non_finite is not None and has_non_finite(elements):
                non_finite[rows.tensor] = 1
        if not self._keeps:
            self._kept = None


@dataclass(frozen=True, slots=True)
class _Rows:
    """One entry of a table as views: `source` and `target` are [R, C]; `target` is None if nothing is written."""

    tensor: int
    source: Tensor
    target: Tensor | None
    dtype: torch.dtype
    pos: int
    pos_pitch: int


def _views(table: CopyTable, memories: Sequence[Tensor], targets: Sequence[Tensor]) -> Iterator[_Rows]:
    # Only memories of this table: those of tables with other dtypes may not be aligned to this dtype.
    sources = {i: _elements(memories[i], table.src_dtype) for i in set(table.memory.tolist())}
    places = {i: _elements(targets[i], table.dst_dtype) for i in set(table.target.tolist()) if targets}
    for row in zip(*(getattr(table, name).tolist() for name in COLUMNS), strict=True):
        tensor, memory, src, src_pitch, target, dst, dst_pitch, rows, cols, pos, pos_pitch = row
        source = _strided(sources[memory], rows, cols, src, src_pitch)
        place = _strided(places[target], rows, cols, dst, dst_pitch) if targets else None
        yield _Rows(tensor, source, place, table.dst_dtype, pos, pos_pitch)


def _elements(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the memory from the first byte of `tensor` to the end of its storage, as a flat tensor of `dtype`."""
    start = tensor.storage_offset() * tensor.element_size()
    assert start % dtype.itemsize == 0, f"a block of {dtype} starts at byte {start} of its storage"
    num_elements = (tensor.untyped_storage().nbytes() - start) // dtype.itemsize
    whole = torch.empty(0, dtype=dtype, device="cpu")
    return whole.set_(tensor.detach().untyped_storage(), start // dtype.itemsize, (num_elements,), (1,))


def _strided(elements: Tensor, rows: int, cols: int, offset: int, pitch: int) -> Tensor:
    return elements.as_strided((rows, cols), (pitch, 1), elements.storage_offset() + offset)
