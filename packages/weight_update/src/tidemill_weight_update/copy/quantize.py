"""Quantizes many matrices to float8 with one launch of a kernel in which each program has one block of 128 x 128."""

# See `kernel` for the reasons.
# ruff: noqa: N803
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false, reportIndexIssue=false

from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

_SIDE = tl.constexpr(128)
_MAX = tl.constexpr(torch.finfo(torch.float8_e4m3fn).max)
_ROW = tl.constexpr(11)

Task = Literal["quantize", "maxima", "quantize with given scales"]
Block = tuple[Tensor, tuple[int, int], Tensor, Tensor]
"""Values, row and column of their first element in its block, result, and scales of the blocks that they touch."""


@triton.jit
def _quantize(table, matrix_of, VALUE: tl.constexpr, ALIGNED: tl.constexpr, FIND: tl.constexpr, WRITE: tl.constexpr):
    program = tl.program_id(0)
    entry = table + tl.load(matrix_of + program).to(tl.int64) * _ROW
    block = program - tl.load(entry).to(tl.int32)
    values = tl.load(entry + 1).to(tl.pointer_type(VALUE))
    pitch, step = tl.load(entry + 2), tl.load(entry + 3)
    quantized = tl.load(entry + 4).to(tl.pointer_type(tl.float8e4nv))
    scales = tl.load(entry + 5).to(tl.pointer_type(tl.float32))
    scales_pitch = tl.load(entry + 6)
    corner = tl.load(entry + 7)
    rows, cols = tl.load(entry + 8), tl.load(entry + 9)
    across = tl.load(entry + 10).to(tl.int32)
    down = block // across
    i0 = down * _SIDE - corner // _SIDE
    j0 = (block - down * across) * _SIDE - corner % _SIDE
    if ALIGNED:  # without it each element is read and written by itself
        values, quantized = tl.multiple_of(values, 16), tl.multiple_of(quantized, 16)
        pitch, cols, j0 = tl.multiple_of(pitch, 16), tl.multiple_of(cols, 16), tl.multiple_of(j0, 16)
        step = 1
    i, j = i0 + tl.arange(0, _SIDE), j0 + tl.arange(0, _SIDE)
    inside = ((i >= 0) & (i < rows))[:, None] & ((j >= 0) & (j < cols))[None, :]
    value = tl.load(values + (i * pitch)[:, None] + (j * step)[None, :], mask=inside, other=0.0).to(tl.float32)
    scale_at = scales + down * scales_pitch + (block - down * across)
    if FIND:
        scale = tl.max(tl.max(tl.abs(value), 1), 0)
        # The maximum of a GPU leaves NaNs out.
        scale = tl.where(tl.max(tl.max((value != value).to(tl.int32), 1), 0) > 0, float("nan"), scale)
        if WRITE:
            scale = tl.math.div_rn(scale, _MAX)
            scale = tl.where(scale == 0.0, 1.0, scale)
        tl.store(scale_at, scale)
    else:
        scale = tl.load(scale_at)
    if WRITE:
        result = tl.math.div_rn(value, scale + tl.zeros_like(value)).to(tl.float8e4nv)
        tl.store(quantized + (i * cols)[:, None] + j[None, :], result, mask=inside)


def is_aligned(block: Block) -> bool:
    """Return whether 16 neighbouring elements of a row can be read and written together."""
    values, (_, col), result, _ = block
    addresses = values.data_ptr(), result.data_ptr()
    return values.stride(1) == 1 and not any(n % 16 for n in (*addresses, values.stride(0), values.shape[1], col))


class QuantizeTable:
    """Matrices of one dtype on one GPU, described once; it refers to their memory but keeps none alive."""

    def __init__(self, blocks: Sequence[Block], *, aligned: bool) -> None:
        values = blocks[0][0]
        self._device, self._aligned = values.device, aligned
        self._dtype = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}[values.dtype]
        counts = np.array([scales.numel() for _, _, _, scales in blocks])
        starts = np.cumsum(counts) - counts
        rows = []
        for start, (each, (row, col), result, scales) in zip(starts.tolist(), blocks, strict=True):
            source = each.data_ptr(), *each.stride()
            target = result.data_ptr(), scales.data_ptr(), scales.stride(0)
            rows.append((start, *source, *target, row * 128 + col, *each.shape, scales.shape[1]))
        self._table = torch.tensor(rows, dtype=torch.int64, device=self._device)
        matrix_of = np.repeat(np.arange(len(blocks), dtype=np.int32), counts)
        self._matrix_of = torch.from_numpy(matrix_of).to(self._device)

    def run(self, task: Task) -> None:
        """Write scales and results of all matrices, or the largest absolute values in place of scales, or results."""
        with torch.cuda.device(self._device):
            _quantize[(len(self._matrix_of),)](
                self._table,
                self._matrix_of,
                VALUE=self._dtype,
                ALIGNED=self._aligned,
                FIND=task != "quantize with given scales",
                WRITE=task != "maxima",
                num_warps=16,
            )
