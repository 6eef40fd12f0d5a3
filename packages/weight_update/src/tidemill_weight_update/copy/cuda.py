"""Execution of copy tables on a GPU, with a Triton kernel that copies, casts, sums and finds NaNs in one pass.

The lower bound is the time to move the bytes through memory, so the kernel keeps many bytes in flight: a thread block
handles one tile (see `tiles`), each thread with several 16-byte loads in flight, and all tiles of a model start in one
launch. The checksum costs one 32-bit mix per 4 bytes and one multiply-add per element; each block adds its sum to the
tensor's by one atomic operation.
"""

import contextlib
from collections.abc import Sequence
from functools import cache, lru_cache, partial
from typing import Any, Literal

import numpy as np
import torch
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

from tidemill_weight_update.copy.kernel import copy_tiles
from tidemill_weight_update.copy.table import Copy, CopyTable, Shard, build_tables
from tidemill_weight_update.copy.tiles import SEGMENT_STRIDE, VECTOR_BYTES, TileGroup, cut
from tidemill_weight_update.tensors import Box, SourceSpec

TILE_ELEMENTS, NUM_WARPS = 4096, 4
"""Numbers of up to 4 bytes, and warps, of a block: each thread has eight loads of 16 bytes in flight. Larger tiles and
more warps are not faster (`bench/copy_kernel.py` has the rates of these).
"""

CACHED_BASES = 4
"""Address lists that are cached on the GPU: two kinds (memories and targets), two halves of a double buffer."""

_WORDS = {1: tl.uint8, 2: tl.uint16, 4: tl.uint32}
_FLOATS = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}

# An element is infinite or NaN if all these bits are set; for an 8-byte float the bits are those of the upper word.
_NON_FINITE = {
    torch.float64: 0x7FF00000,
    torch.float32: 0x7F800000,
    torch.bfloat16: 0x7F80,
    torch.float16: 0x7C00,
    torch.float8_e5m2: 0x7C,
    torch.float8_e4m3fn: 0x7F,
}


class CudaCopier:
    """Runs the same copies repeatedly, between memories and targets that may move between runs.

    Args:
        tables: copies to run; see `CopyTable`. Supported casts are those between float32, bfloat16 and float16.
        device: device on which the kernel runs. Memories and targets are its own, or peers' memory mapped into this
            process.
        checksum_of: elements that `run` sums and checks: those read ("source"), or those written after a cast
            ("target").
    """

    def __init__(
        self, tables: Sequence[CopyTable], device: torch.device, checksum_of: Literal["source", "target"] = "source"
    ) -> None:
        self._tables = tuple(tables)
        for table in self._tables:
            _check(table)
        # Normalized to include the device index.
        self._device = torch.empty(0, device=device).device
        self._checksum_target = checksum_of == "target"
        # Whether the address of each block is a multiple of VECTOR_BYTES, which is true for torch's allocations.
        self._aligned = [np.ones(_length(self._tables, kind), np.bool_) for kind in ("memory", "target")]
        self._launches = self._cut()
        self._uploaded = lru_cache(CACHED_BASES)(partial(_uploaded, self._tables, self._device))

    def run(
        self,
        memory_bases: Sequence[int],
        target_bases: Sequence[int],
        checksums: Tensor | None = None,
        non_finite: Tensor | None = None,
    ) -> None:
        """Queue the copies, unless there are no targets, and their checksums on the current stream.

        The sizes of the memories are unknown here: the caller has checked that the tables stay inside them.

        Args:
            checksums: contiguous int64 [number of tensors] on the device, added to; or None.
            non_finite: contiguous int32 [number of tensors] on the device, set to 1 for tensors with infinite or NaN
                elements; or None.
        """
        memories, memories_aligned = self._uploaded("memory", tuple(memory_bases))
        targets, targets_aligned = self._uploaded("target", tuple(target_bases) or (0,) * len(self._aligned[1]))
        aligned = [memories_aligned, targets_aligned]
        if not all(map(np.array_equal, aligned, self._aligned)):
            self._aligned = aligned
            self._launches = self._cut()
        with torch.cuda.device(self._device) if self._device.type == "cuda" else contextlib.nullcontext():
            for launch in self._launches:
                launch.start(memories, targets, checksums, non_finite, write=len(target_bases) > 0)

    def _cut(self) -> list["_Launch"]:
        return [
            _Launch(group, self._device, self._checksum_target)
            for table in self._tables
            for group in cut(table, TILE_ELEMENTS, *self._aligned)
        ]


@cache
def load_kernel(device: torch.device) -> None:
    """Copy 16 bytes, once in a process, so that later copies do not wait 0.4 s for its first kernel."""
    dtype, box = torch.bfloat16, Box.whole((8,))
    copy, shard = Copy("", box, "", 0, (1,), dtype), Shard(box, 0, 0, (1,))
    tables = build_tables([copy], [SourceSpec("", box.shape, dtype)], {"": [shard]}, ("",))
    source, target = torch.zeros(2, 8, dtype=dtype, device=device)
    checksums = torch.zeros(1, dtype=torch.int64, device=device)
    CudaCopier(tables, device).run([source.data_ptr()], [target.data_ptr()], checksums)


def _uploaded(
    tables: Sequence[CopyTable], device: torch.device, kind: Literal["memory", "target"], addresses: tuple[int, ...]
) -> tuple[Tensor, NDArray[np.bool_]]:
    """Check addresses of blocks; return them on the device, int64, and which are multiples of VECTOR_BYTES."""
    number = _length(tables, kind)
    if len(addresses) < number:
        raise ValueError(f"expected {number} {kind} addresses, got {len(addresses)}")
    values = np.array(addresses[:number], np.int64)
    for table in tables:
        dtype = table.src_dtype if kind == "memory" else table.dst_dtype
        used = values[getattr(table, kind)]
        wrong = used % min(dtype.itemsize, 4) != 0
        if wrong.any():
            raise ValueError(f"{kind} address {used[wrong][0]:#x} is not a multiple of the size of {dtype}")
    return torch.from_numpy(values).to(device, copy=True), values % VECTOR_BYTES == 0


class _Launch:
    """A group of tiles on the device."""

    def __init__(self, group: TileGroup, device: torch.device, checksum_target: bool) -> None:
        self.segments = torch.from_numpy(group.segments).to(device)
        self.tile_segment = torch.from_numpy(group.tile_segment).to(device)
        cast = group.src_dtype != group.dst_dtype
        sent = group.dst_dtype if checksum_target else group.src_dtype
        self._sent = sent
        width = min(sent.itemsize, 4)
        word = _WORDS[width * group.packed]
        self._constants: dict[str, Any] = {
            "SRC": _FLOATS[group.src_dtype] if cast else word,
            "DST": _FLOATS[group.dst_dtype] if cast else word,
            "SENT": word,
            "CAST": cast,
            "CHECKSUM_TARGET": checksum_target,
            "BITS": 8 * width,
            "PACKED": group.packed,
            "UNIT": group.unit,
            "R": group.shape[0],
            "C": group.shape[1],
            "STRIDE": SEGMENT_STRIDE,
            "HALVES": sent.itemsize == 8,
            "num_warps": NUM_WARPS,
        }

    def start(
        self, memories: Tensor, targets: Tensor, checksums: Tensor | None, non_finite: Tensor | None, write: bool
    ) -> None:
        modes: dict[str, Any] = {
            "WRITE": write,
            "CHECKSUM": checksums is not None,
            "NON_FINITE": 0 if non_finite is None else _non_finite_bits(self._sent),
        }
        copy_tiles[(len(self.tile_segment),)](
            self.tile_segment,
            self.segments,
            memories,
            targets,
            self.segments if checksums is None else checksums,
            self.tile_segment if non_finite is None else non_finite,
            **modes,
            **self._constants,
        )


def _check(table: CopyTable) -> None:
    same = table.src_dtype == table.dst_dtype
    if same and table.src_dtype.itemsize in (1, 2, 4, 8):
        return
    if not {table.src_dtype, table.dst_dtype} <= _FLOATS.keys():
        raise ValueError(
            f"the GPU copies elements of 1, 2, 4 or 8 bytes and casts between {', '.join(map(str, _FLOATS))}, "
            f"got {table.src_dtype} to {table.dst_dtype}; cast the tensor before it is sent"
        )


def _non_finite_bits(dtype: torch.dtype) -> int:
    if not (dtype.is_floating_point or dtype.is_complex):
        return 0
    if dtype not in _NON_FINITE:
        raise ValueError(
            f"non-finite elements of {dtype} cannot be found on a GPU; pass allow_non_finite=True to WeightUpdater"
        )
    return _NON_FINITE[dtype]


def _length(tables: Sequence[CopyTable], column: str) -> int:
    return max((int(getattr(table, column).max(initial=-1)) + 1 for table in tables), default=0)
