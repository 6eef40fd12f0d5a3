"""Log-probabilities and entropy of tokens from hidden states, without ever holding the logits of all tokens."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from tidemill_engines.head.logits import LogitRule, LogitSlice
from tidemill_engines.head.softmax import SoftmaxParts, logit_gradients

CHUNK_BYTES = 512 << 20
"""What the logits of one chunk may take; a tensor of this size and a few smaller ones are alive at a time."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Head:
    """What turns hidden states into logits: softcap * tanh(scale * (hidden @ weight.T + bias) / softcap).

    Attributes:
        weight: [V, H], plain (not sharded).
        bias: [V] or None.
        scale: that the logits are multiplied with.
        softcap: that the logits are bounded by; None means not at all.
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
    """The log-probability of each label under softmax(logits / temperature), and optionally its entropy in nats.

    The vocabulary is gone through in chunks, in the backward pass once more, so that beside inputs, outputs and their
    gradients only the logits of all tokens for one chunk are held. So each chunk of the weight's gradient is one matrix
    product over all tokens, and only the gradient of the hidden states is a sum over chunks, kept in float32.
    Differentiable (once) in hidden states, weight and bias.

    Args:
        hidden_states: [M, H] of the head's dtype. Factors of matrix products are in it, their sums and all else in
            float32 at least: logits of a bfloat16 head are not rounded to bfloat16.
        labels: [M] int64.
        chunk_bytes: what the logits of a chunk may take in the dtype of the result; it has at least one column.
        group: ranks that have a vocabulary together, each some rows of its head and all hidden states. Labels are then
            counted from the rank's first row, results are the same on all ranks, and gradients of hidden states are the
            rank's share. Collective in the forward pass.

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
        # The weight is saved as it came: FSDP may free its storage meanwhile and fills it again before the backward.
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
        # Expanded gradients, such as those of a sum, are written out for the kernels.
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
    """Runs of the vocabulary; matrix products are fastest where their sizes are multiples of 128."""
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
    """a @ b in `dtype`, which may be wider than theirs; the product is not rounded to theirs."""
    if a.dtype == dtype:
        return a @ b
    if a.is_cuda:
        return torch.mm(a, b, out_dtype=dtype)
    return a.to(dtype) @ b.to(dtype)


def _add_product(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """total += a @ b, where `total` may be of a wider dtype."""
    if total.dtype == a.dtype:
        total.addmm_(a, b)
    elif a.is_cuda:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        total.addmm_(a.to(total.dtype), b.to(total.dtype))
