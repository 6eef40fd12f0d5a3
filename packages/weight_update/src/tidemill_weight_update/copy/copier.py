"""Copiers: run copy tables on host memory with torch's views and copies, and fill the arena on the host or on a GPU."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from tidemill_weight_update.copy.checksum import checksum_rows
from tidemill_weight_update.copy.checksum import non_finite as count_non_finite
from tidemill_weight_update.copy.table import CopyTable

CACHED_RUNS = 2
"""Number of memory sets whose views are cached: the two halves of a double buffer."""


@dataclass(frozen=True, slots=True)
class _Rows:
    """One entry of a table as views: `source` and `target` are [R, C]."""

    tensor: int
    source: Tensor
    target: Tensor
    pos: int
    pos_pitch: int


class HostCopier:
    """Runs the same copies repeatedly, from memories that may change between runs into fixed targets.

    Args:
        tables: copies to run; see `CopyTable`.
        targets: tensors in host memory that the tables' `target` columns index. Offsets count elements of the table's
            `dst_dtype` from the first byte of a target, whatever the target's own dtype and shape.
        checksum_of: elements that `run` sums and counts: those read ("source"), or those written after a cast
            ("target").
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
        """Copy, and add to `checksums` and `non_finite` what was copied.

        Args:
            memories: tensors that the tables' `memory` columns index; offsets count elements of the table's `src_dtype`
                from the first byte of a memory, whatever its own dtype and shape. They stay alive until
                two runs with other memories.
            checksums: int64 [number of tensors], or None.
            non_finite: int32 [number of tensors], number of infinite or NaN elements, or None.
            write: False only reads.

        Raises:
            ValueError: a copy exceeds a memory or target, or one is not aligned to its dtype.
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
    # Only memories of this table: those of tables with other dtypes may not be aligned to this dtype.
    sources = {i: _elements(memories[i], table.src_dtype, f"memory {i}") for i in set(table.memory.tolist())}
    places = {i: _elements(targets[i], table.dst_dtype, f"target {i}") for i in set(table.target.tolist())}
    columns = (
        table.tensor,
        table.rows,
        table.cols,
        table.memory,
        table.src,
        table.src_pitch,
        table.target,
        table.dst,
        table.dst_pitch,
        table.pos,
        table.pos_pitch,
    )
    views = []
    for row in zip(*(column.tolist() for column in columns), strict=True):
        tensor, rows, cols, memory, src, src_pitch, target, dst, dst_pitch, pos, pos_pitch = row
        source = _strided(sources[memory], rows, cols, src, src_pitch, f"memory {memory}")
        place = _strided(places[target], rows, cols, dst, dst_pitch, f"target {target}")
        views.append(_Rows(tensor=tensor, source=source, target=place, pos=pos, pos_pitch=pos_pitch))
    return views


def _elements(tensor: Tensor, dtype: torch.dtype, name: str) -> Tensor:
    """Return the memory from the first byte of `tensor` to the end of its storage, as a flat tensor of `dtype`."""
    start = tensor.storage_offset() * tensor.element_size()
    if tensor.device.type != "cpu":
        raise ValueError(f"{name} is on {tensor.device}, expected host memory; use CudaCopier for GPU memory")
    if start % dtype.itemsize:
        raise ValueError(
            f"{name} must start at a multiple of the {dtype.itemsize} bytes of {dtype}, got byte {start} of its storage"
        )
    num_elements = (tensor.untyped_storage().nbytes() - start) // dtype.itemsize
    whole = torch.empty(0, dtype=dtype, device="cpu")
    return whole.set_(tensor.detach().untyped_storage(), start // dtype.itemsize, (num_elements,), (1,))


def _strided(elements: Tensor, rows: int, cols: int, offset: int, pitch: int, name: str) -> Tensor:
    end = offset + max(rows - 1, 0) * pitch + cols
    if offset < 0 or pitch < 0 or end > elements.numel():
        raise ValueError(
            f"a copy needs elements {offset} to {end} of {name}, which has {elements.numel()} of {elements.dtype}; "
            f"the parameters may have changed after the plan was recorded; restart the engine"
        )
    return elements.as_strided((rows, cols), (pitch, 1), elements.storage_offset() + offset)


READING_STEPS = 4
"""Tiles that a thread block reads one after the other when nothing is written."""


class SendCopier(Protocol):
    """Copies pieces into an arena, casts them on the way, and computes checksums of what is sent."""

    def run(
        self,
        pieces: Sequence[Tensor] | Sequence[int],
        arena: Tensor | None,
        checksums: Tensor,
        non_finite: Tensor | None,
    ) -> None:
        """Add to `checksums` (int64) and `non_finite` (int32, if given), by source; without an arena only read.

        Args:
            pieces: memories of the tables: tensors, or addresses of GPU memory.
        """
        ...


def send_copier(tables: Sequence[CopyTable], device: torch.device, *, stays: bool) -> SendCopier:
    """Return the copier for an arena on `device`, or for pieces on `device` that are only read (`stays`)."""
    return _HostSend(tables) if device.type == "cpu" else _CudaSend(tables, device, stays=stays)


class _HostSend:
    def __init__(self, tables: Sequence[CopyTable]) -> None:
        self._tables = tables

    def run(
        self,
        pieces: Sequence[Tensor] | Sequence[int],
        arena: Tensor | None,
        checksums: Tensor,
        non_finite: Tensor | None,
    ) -> None:
        assert arena is not None, "host memory of this process cannot be read by others"
        # Not cached: its views would keep the trainer's tensors alive.
        copier = HostCopier(self._tables, [arena], checksum_of="target")
        copier.run(
            [_on_device(piece, arena.device) for piece in pieces if isinstance(piece, Tensor)], checksums, non_finite
        )


class _CudaSend:
    def __init__(self, tables: Sequence[CopyTable], device: torch.device, *, stays: bool) -> None:
        from tidemill_weight_update.copy.cuda import CudaCopier, Tiling

        tiling = Tiling(steps=READING_STEPS) if stays else None
        self._copier = CudaCopier(tables, device, checksum_of="target", tiling=tiling)
        self._device = device

    def run(
        self,
        pieces: Sequence[Tensor] | Sequence[int],
        arena: Tensor | None,
        checksums: Tensor,
        non_finite: Tensor | None,
    ) -> None:
        # The allocator reuses memory of temporary copies in stream order, so it stays valid until it is read.
        here = [_on_device(piece, self._device) for piece in pieces if isinstance(piece, Tensor)]
        addresses = [piece.data_ptr() for piece in here] or pieces
        target = 0 if arena is None else arena.data_ptr()
        self._copier.run(addresses, [target], checksums, non_finite, write=arena is not None)  # type: ignore[arg-type]


def _on_device(piece: Tensor, device: torch.device) -> Tensor:
    return piece if piece.device == device else piece.to(device).contiguous()
