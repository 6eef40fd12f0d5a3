"""Log-probabilities and entropy of tokens from hidden states, without materializing all logits."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from tidemill_engines.head.logits import LogitRule, LogitSlice
from tidemill_engines.head.softmax import SoftmaxParts, logit_gradients

CHUNK_BYTES = 512 << 20
"""Maximum bytes of the logits of one chunk; one tensor of this size and a few smaller ones are alive at a time."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Head:
    """The function from hidden states to logits: softcap * tanh(scale * (hidden @ weight.T + bias) / softcap).

    Attributes:
        weight: [V, H], a plain tensor (not sharded).
        bias: [V] or None.
        scale: factor of the logits.
        softcap: bound of the logits; None is no bound.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None = None
    scale: float = 1.0
    softcap: float | None = None


def head_log_probs(
    hidden_states: torch.Tensor,
    head: Head,
    labels: torch.Tensor,
    *,
    temperature: float = 1.0,
    entropy: bool = False,
    chunk_bytes: int = CHUNK_BYTES,
    group: dist.ProcessGroup | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Compute the log-probability of each label under softmax(logits / temperature), and optionally entropy in nats.

    The vocabulary is processed in chunks, and recomputed in the backward pass, so only the logits of all tokens for one
    chunk are in memory. Each chunk of the weight's gradient is one matrix product over all tokens; the gradient of the
    hidden states is a sum over chunks in float32. Differentiable once in hidden states, weight and bias.

    Args:
        hidden_states: [M, H] in the dtype of the head. Matrix products take this dtype and accumulate in float32 or
            wider, as does everything else: logits of a bfloat16 head are not rounded to bfloat16.
        labels: [M] int64.
        chunk_bytes: maximum bytes of the logits of a chunk in the dtype of the result; a chunk has at least one column.
        group: ranks that share the vocabulary: each has some rows of the head and all hidden states. Labels then count
            from the rank's first row, results are the same on all ranks, and gradients of the hidden states are this
            rank's part of the sum. Collective in the forward pass.

    Returns:
        log_probs [M] and entropy [M] or None, in float32 (float64 for float64 hidden states).
    """
    rule = LogitRule(scale=head.scale, softcap=head.softcap, temperature=temperature)
    log_probs, entropies = _HeadLogProbs.apply(hidden_states, head.weight, head.bias, labels, rule, chunk_bytes, group)
    return log_probs, entropies if entropy else None


class _HeadLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any,
        hidden_states: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        labels: torch.Tensor,
        rule: LogitRule,
        chunk_bytes: int,
        group: dist.ProcessGroup | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        dtype = torch.promote_types(hidden_states.dtype, torch.float32)
        parts = SoftmaxParts(len(labels), dtype, hidden_states.device)
        for chunk in _vocabulary_chunks(len(labels), len(weight), dtype, chunk_bytes):
            parts.add(_logits(hidden_states, weight, bias, chunk, dtype), labels, rule)
        if group is not None:
            parts.combine(group)
        statistics = parts.statistics()
        # Save the original weight: FSDP frees its storage after the forward and refills it before the backward.
        ctx.save_for_backward(hidden_states, weight, bias, labels, statistics)
        ctx.settings = rule, chunk_bytes
        ctx.set_materialize_grads(False)
        return parts.log_probs(), statistics[2].clone()

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, grad_log_probs: torch.Tensor | None, grad_entropy: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        hidden_states, weight, bias, labels, statistics = ctx.saved_tensors
        rule, chunk_bytes = ctx.settings
        wants_hidden, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        dtype = statistics.dtype
        # The kernels require contiguous gradients; those of a sum are expanded.
        grad_log_probs = torch.zeros_like(statistics[0]) if grad_log_probs is None else grad_log_probs.contiguous()
        grad_entropy = None if grad_entropy is None else grad_entropy.contiguous()
        grad_hidden = torch.zeros_like(hidden_states, dtype=dtype) if wants_hidden else None
        grad_weight = torch.empty_like(weight) if wants_weight else None
        grad_bias = torch.empty_like(bias) if wants_bias else None
        for chunk in _vocabulary_chunks(len(labels), len(weight), dtype, chunk_bytes):
            piece = _logits(hidden_states, weight, bias, chunk, dtype)
            grad = logit_gradients(piece, labels, statistics, grad_log_probs, grad_entropy, rule, weight.dtype)
            del piece
            if grad_hidden is not None:
                _add_product(grad_hidden, grad, weight[chunk])
            if grad_weight is not None:
                torch.mm(grad.T, hidden_states, out=grad_weight[chunk])
            if grad_bias is not None:
                grad_bias[chunk] = grad.sum(0, dtype=dtype)
            del grad
        if grad_hidden is not None:
            grad_hidden = grad_hidden.to(hidden_states.dtype)
        return grad_hidden, grad_weight, grad_bias, None, None, None, None


def _vocabulary_chunks(num_tokens: int, vocab_size: int, dtype: torch.dtype, chunk_bytes: int) -> list[slice]:
    """Return slices of the vocabulary, in multiples of 128, for which matrix products are fastest."""
    size = max(1, chunk_bytes // (max(num_tokens, 1) * dtype.itemsize))
    if size > 128:
        size -= size % 128
    return [slice(start, min(start + size, vocab_size)) for start in range(0, vocab_size, size)]


def _logits(
    hidden_states: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, chunk: slice, dtype: torch.dtype
) -> LogitSlice:
    logits = _product(hidden_states, weight[chunk].T, dtype)
    return LogitSlice(logits, None if bias is None else bias[chunk], chunk.start)


def _product(a: torch.Tensor, b: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return a @ b in `dtype`, which may be wider than their dtype, without rounding to it."""
    if a.dtype == dtype:
        return a @ b
    if a.is_cuda:
        return torch.mm(a, b, out_dtype=dtype)
    return a.to(dtype) @ b.to(dtype)


def _add_product(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """Add a @ b to `total`, which may have a wider dtype."""
    if total.dtype == a.dtype:
        total.addmm_(a, b)
    elif a.is_cuda:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        total.addmm_(a.to(total.dtype), b.to(total.dtype))
