"""The two passes over the logits of a slice as Triton kernels; each reads the logits once.

They compute the same as `head.softmax`, which documents the numbers.
"""

# Triton's kernels look like Python functions but are not: compile-time arguments are upper case, and pyright infers
# wrong types.
# ruff: noqa: N803
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false, reportIndexIssue=false
# pyright: reportOperatorIssue=false

import torch
import triton
import triton.language as tl

from tidemill_engines.head.logits import LogitRule, LogitSlice

_BLOCK = 4096


@triton.jit
def _softened(x, bias, column, inside, inner, outer, HAS_BIAS: tl.constexpr, SOFTCAP: tl.constexpr):
    """Return z and dz / dx of a block of logits."""
    if HAS_BIAS:
        x += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
    if SOFTCAP:
        shrunk = tl.exp(-2.0 * tl.abs(x * inner))
        bounded = (1.0 - shrunk) / (1.0 + shrunk)
        z = tl.where(x < 0, -bounded, bounded) * outer
        slope = (1.0 - bounded * bounded) * (inner * outer)
    else:
        z = x * outer
        slope = outer
    return z, slope


# Arguments that change from call to call must not cause a recompilation.
@triton.jit(do_not_specialize=["first", "num_tokens"])
def _add_kernel(
    parts,  # float32 [4, M]
    logits,  # float32 [M, C]
    bias,  # [C]
    labels,  # int64 [M]
    first,
    num_tokens,
    num_columns,
    inner,
    outer,
    HAS_BIAS: tl.constexpr,
    SOFTCAP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Add the logits of a token to its statistics, block by block."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * num_columns
    parts += row
    largest = tl.load(parts)
    total = tl.load(parts + num_tokens)
    moment = tl.load(parts + 2 * num_tokens)
    for start in range(0, num_columns, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < num_columns
        x = tl.load(logits + column, mask=inside, other=0.0)
        z, _ = _softened(x, bias, column, inside, inner, outer, HAS_BIAS, SOFTCAP)
        z = tl.where(inside, z, float("-inf"))
        before = largest
        largest = tl.maximum(before, tl.max(z, 0))
        shift = before - largest
        z -= largest
        exp = tl.exp(z)
        moment = (moment + shift * total) * tl.exp(shift) + tl.sum(tl.where(inside, exp * z, 0.0), 0)
        total = total * tl.exp(shift) + tl.sum(exp, 0)
    tl.store(parts, largest)
    tl.store(parts + num_tokens, total)
    tl.store(parts + 2 * num_tokens, moment)
    label = tl.load(labels + row) - first
    own = (label >= 0) & (label < num_columns)
    x = tl.load(logits + label, mask=own, other=0.0)
    z, _ = _softened(x, bias, label, own, inner, outer, HAS_BIAS, SOFTCAP)
    tl.store(parts + 3 * num_tokens, z, mask=own)


@triton.jit(do_not_specialize=["first", "num_tokens"])
def _gradient_kernel(
    out,  # [M, C], may be the logits
    logits,  # float32 [M, C]
    bias,  # [C]
    labels,  # int64 [M]
    statistics,  # float32 [3, M]
    grad_log_probs,  # float32 [M]
    grad_total,  # float32 [M]
    grad_entropy,  # float32 [M]
    first,
    num_tokens,
    num_columns,
    inner,
    outer,
    HAS_BIAS: tl.constexpr,
    SOFTCAP: tl.constexpr,
    HAS_ENTROPY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute the gradients of a block of the logits of a token."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < num_columns
    x = tl.load(logits + row * num_columns + column, mask=inside, other=0.0)
    z, slope = _softened(x, bias, column, inside, inner, outer, HAS_BIAS, SOFTCAP)
    log_p = z - tl.load(statistics + row) - tl.load(statistics + num_tokens + row)
    weight = tl.load(grad_total + row)
    if HAS_ENTROPY:
        weight += tl.load(grad_entropy + row) * (log_p + tl.load(statistics + 2 * num_tokens + row))
    label = tl.load(labels + row) - first
    grad = tl.where(column == label, tl.load(grad_log_probs + row), 0.0) - tl.exp(log_p) * weight
    grad = (grad * slope).to(out.dtype.element_ty)
    tl.store(out + row * num_columns + column, grad, mask=inside)


def add_slice(parts: torch.Tensor, piece: LogitSlice, labels: torch.Tensor, rule: LogitRule) -> None:
    """Implement `SoftmaxParts.add`; `parts` are its values."""
    num_tokens, num_columns = piece.logits.shape
    if not num_tokens:
        return
    block = min(_BLOCK, triton.next_power_of_2(num_columns))
    _add_kernel[(num_tokens,)](
        parts,
        piece.logits,
        piece.bias,
        labels,
        piece.first,
        num_tokens,
        num_columns,
        rule.inner,
        rule.outer,
        HAS_BIAS=piece.bias is not None,
        SOFTCAP=rule.softcap is not None,
        BLOCK=block,
        num_warps=_num_warps(block),
    )


def slice_gradients(
    piece: LogitSlice,
    labels: torch.Tensor,
    statistics: torch.Tensor,
    grad_log_probs: torch.Tensor,
    grad_total: torch.Tensor,
    grad_entropy: torch.Tensor | None,
    rule: LogitRule,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Implement `softmax.logit_gradients`."""
    num_tokens, num_columns = piece.logits.shape
    out = piece.logits if dtype == piece.logits.dtype else torch.empty_like(piece.logits, dtype=dtype)
    if not num_tokens:
        return out
    block = min(_BLOCK, triton.next_power_of_2(num_columns))
    _gradient_kernel[(num_tokens, triton.cdiv(num_columns, block))](
        out,
        piece.logits,
        piece.bias,
        labels,
        statistics,
        grad_log_probs,
        grad_total,
        grad_entropy,
        piece.first,
        num_tokens,
        num_columns,
        rule.inner,
        rule.outer,
        HAS_BIAS=piece.bias is not None,
        SOFTCAP=rule.softcap is not None,
        HAS_ENTROPY=grad_entropy is not None,
        BLOCK=block,
        num_warps=_num_warps(block),
    )
    return out


def _num_warps(block: int) -> int:
    """Return the number of warps for 16 logits per thread."""
    return min(max(block // 512, 1), 8)
