"""Additive checksums: the checksums of disjoint parts of a tensor add up to the checksum of the whole.

The checksum of a tensor is, modulo 2**64 and stored as a signed 64-bit number,

    sum over its elements of  bits(element) * power(position % lanes) * (mix32(position // lanes) | 1)

where `bits` reads the element as an unsigned integer and `position` is its index in the flattened *global* tensor, so
the sharding does not matter. An element of 8 bytes counts as two of 4. The `lanes = 16 / itemsize` elements of a group
of 16 bytes share one 32-bit mix and differ by `power(lane) = LANE_FACTOR ** lane mod 2**32`.

All factors are odd, hence invertible: any single changed element changes the checksum. `mix32` reads 32 bits, so the
factors repeat after 64 GiB of one tensor. The checksum is not cryptographic: it detects lost, stale and misplaced
bytes, not forgery.

The arithmetic is chosen for a GPU thread, which loads 16 bytes at once: one multiply-add per element, and one mix and
one multiplication per group. `mix32` is two multiplications, each folded to 32 bits, as in mum-hash and wyhash, with
the primes of xxHash32. On sequential numbers it scatters as well as finalizers of shifts and multiplications
(lowbias32, murmur3), with a third of their other operations.
"""

import math
from collections.abc import Iterator
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

CHUNK_ELEMENTS = 1 << 16
"""Elements processed at once: temporaries are a few int64 tensors of this many elements, about 4 MiB."""

MIX_START = 0x165667B1
MIX_FACTORS = (0x9E3779B1, 0x85EBCA77)
LANE_FACTOR = 0xC2B2AE3D

GROUP_BYTES = 16
"""Bytes whose elements share a mix."""

_MASK32 = 0xFFFFFFFF
_BITS = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32, 8: torch.uint32}


def mix32(values: Tensor) -> Tensor:
    """Mix 32-bit integers: flipping any input bit flips each output bit in 49 to 51 % of cases."""
    mixed = (values + MIX_START) & _MASK32
    for factor in MIX_FACTORS:
        mixed *= factor  # 64-bit product; the sign does not matter
        mixed ^= mixed >> 32  # fold its halves
        mixed &= _MASK32
    return mixed


def checksum_rows(rows: Tensor, pos: int, pos_pitch: int) -> Tensor:
    """Return the checksum of equidistant rows of a global tensor.

    Args:
        rows: [R, C], any strides, any dtype of 1, 2, 4 or 8 bytes per element, any device.
        pos: position of `rows[0, 0]` in the flattened global tensor; the other elements of its row follow.
        pos_pitch: distance of `rows[r + 1, 0]` from `rows[r, 0]` in positions.

    Returns:
        int64 [], on the device of `rows`.
    """
    if rows.element_size() not in _BITS:
        raise TypeError(f"checksums need elements of 1, 2, 4 or 8 bytes, got {rows.dtype}")
    rows = rows.detach()
    if rows.element_size() == 8:  # an element counts as two
        rows, pos, pos_pitch = rows.contiguous().view(torch.uint32), 2 * pos, 2 * pos_pitch
    lanes = GROUP_BYTES // rows.element_size()
    total = torch.zeros((), dtype=torch.int64, device=rows.device)
    for piece, row, col in _pieces(rows.view(_BITS[rows.element_size()])):
        factors = _factors(*piece.shape, pos + row * pos_pitch + col, pos_pitch, lanes, rows.device)
        total += piece.to(torch.int64).mul_(factors).sum()
    return total


@lru_cache(maxsize=128)  # the pieces of a small model are the same at each update; at most 64 MiB
def _factors(rows: int, cols: int, pos: int, pos_pitch: int, lanes: int, device: torch.device) -> Tensor:
    """Return the factors of the elements of equidistant rows: int64 [rows, cols]."""
    powers = torch.tensor([pow(LANE_FACTOR, lane, 2**32) for lane in range(lanes)], device=device)
    down = torch.arange(rows, device=device)[:, None]
    if rows > 1 and pos_pitch % lanes:  # each row starts at another lane
        at = pos + down * pos_pitch + torch.arange(cols, device=device)
        return mix32(at // lanes).bitwise_or_(1) * powers[at % lanes]
    group, lane = divmod(pos, lanes)
    groups = group + down * (pos_pitch // lanes) + torch.arange(-(-(lane + cols) // lanes), device=device)
    mixes = mix32(groups).bitwise_or_(1)
    return (mixes[:, :, None] * powers).view(rows, -1)[:, lane : lane + cols]


def _pieces(rows: Tensor) -> Iterator[tuple[Tensor, int, int]]:
    """Yield views of at most CHUNK_ELEMENTS that tile `rows`, each with its first row and column."""
    num_rows, num_cols = rows.shape
    cols = max(1, min(num_cols, CHUNK_ELEMENTS))
    for row in range(0, num_rows, CHUNK_ELEMENTS // cols):
        for col in range(0, num_cols, cols):
            yield rows[row : row + CHUNK_ELEMENTS // cols, col : col + cols], row, col


def has_non_finite(rows: Tensor) -> bool:
    """Return whether `rows` [R, C] has infinite or NaN elements; False for integers."""
    if not (rows.is_floating_point() or rows.is_complex()):
        return False
    # torch.aminmax is not defined for 8-bit floats, every one of which has an exact float32, and for complex numbers.
    rows = torch.view_as_real(rows.detach()).flatten(1) if rows.is_complex() else rows.detach()
    for piece, _, _ in _pieces(rows):
        piece = piece.float() if piece.element_size() == 1 else piece
        if piece.numel() and not all(math.isfinite(bound.item()) for bound in torch.aminmax(piece)):  # NaN if any is
            return True
    return False


class TensorSums:
    """Checksums by tensor, and whether it has non-finite elements: accumulated on a device, read on the host.

    Attributes:
        checksums: int64 [num_tensors] on the device.
        non_finite: int32 [num_tensors] on the device, 1 for tensors that have some; None if they are not looked for.
    """

    def __init__(self, num_tensors: int, device: torch.device, *, finds_non_finite: bool) -> None:
        # One buffer, so that one transfer is enough.
        self._sums = torch.zeros(num_tensors * (12 if finds_non_finite else 8), dtype=torch.uint8, device=device)
        self._num_tensors = num_tensors
        self.checksums = self._sums[: 8 * num_tensors].view(torch.int64)
        self.non_finite = self._sums[8 * num_tensors :].view(torch.int32) if finds_non_finite else None
        self._device = device
        self._event = torch.cuda.Event() if device.type == "cuda" else None
        self._on_host = torch.empty_like(self._sums, device="cpu", pin_memory=True) if self._event else self._sums

    def clear(self) -> None:
        """Set all sums to zero, in the order of the current stream."""
        self._sums.zero_()

    def fetch(self) -> None:
        """Queue the transfer to the host on the current stream."""
        if self._event is not None:
            self._on_host.copy_(self._sums, non_blocking=True)
            self._event.record(torch.cuda.current_stream(self._device))

    def wait(self) -> None:
        """Return when the transfer queued by `fetch` is complete."""
        if self._event is not None:
            self._event.synchronize()

    def checksums_on_host(self) -> NDArray[np.int64]:
        """Return the checksums of the last transfer: int64 [num_tensors]; the next `fetch` overwrites them."""
        return self._on_host[: 8 * self._num_tensors].numpy().view(np.int64)

    def not_finite(self) -> list[int]:
        """Return the indices of tensors with non-finite elements, as of the last transfer."""
        return np.flatnonzero(self._on_host[8 * self._num_tensors :].numpy().view(np.int32)).tolist()
