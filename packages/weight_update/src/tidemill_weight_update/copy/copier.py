"""Filling the arena, on the host or on a GPU."""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from tidemill_weight_update.copy.host import HostCopier
from tidemill_weight_update.copy.table import CopyTable

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
