"""Log-probabilities and entropy of tokens from hidden states, without ever holding the logits of all tokens."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

CHUNK_BYTES = 256 << 20
"""What the logits of one chunk may take; a few tensors of this size are alive at a time."""


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
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The log-probability of each label under softmax(logits / temperature), and optionally its entropy in nats.

    Head and softmax are applied to chunks of tokens, in the backward pass once more, so that beside inputs, outputs
    and their gradients only the logits of one chunk are held. Differentiable (once) in hidden states, weight and bias.

    Args:
        hidden_states: [M, H] of the head's dtype. The matrix product is in it, all else in float32 at least.
        labels: [M] int64.
        chunk_bytes: what the logits of a chunk may take in the dtype of the result; a chunk has at least one token.

    Returns:
        log_probs [M] and entropy [M] or None, in float32 (float64 for float64 hidden states).
    """
    out = _HeadLogProbs.apply(
        hidden_states,
        head.weight,
        head.bias,
        labels,
        _Settings(
            scale=head.scale,
            softcap=head.softcap,
            temperature=temperature,
            entropy=entropy,
            chunk_bytes=chunk_bytes,
        ),
    )
    assert isinstance(out, tuple)
    return out


@dataclass(frozen=True, kw_only=True, slots=True)
class _Settings:
    scale: float
    softcap: float | None
    temperature: float
    entropy: bool
    chunk_bytes: int


class _HeadLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any,
        hidden_states: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        labels: torch.Tensor,
        settings: _Settings,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        # The weight is saved as it came: FSDP may free its storage meanwhile and fills it again before the backward.
        ctx.save_for_backward(hidden_states, weight, bias, labels)
        ctx.settings = settings
        dtype = torch.promote_types(hidden_states.dtype, torch.float32)
        log_probs = hidden_states.new_empty(len(labels), dtype=dtype)
        entropy = torch.empty_like(log_probs) if settings.entropy else None
        for rows in token_chunks(len(labels), len(weight), dtype, settings.chunk_bytes):
            log_p, _ = _log_softmax(hidden_states[rows], weight, bias, settings)
            log_probs[rows] = log_p.gather(-1, labels[rows, None]).squeeze(-1)
            if entropy is not None:
                entropy[rows] = -log_p.exp().mul_(log_p).sum(-1)
        return log_probs, entropy

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, grad_log_probs: torch.Tensor, grad_entropy: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        hidden_states, weight, bias, labels = ctx.saved_tensors
        settings: _Settings = ctx.settings
        dtype = grad_log_probs.dtype
        wants_hidden, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        grad_hidden = torch.empty_like(hidden_states) if wants_hidden else None
        # Sums over chunks are kept in full precision, else the gradient would depend on how many chunks there are.
        grad_weight = torch.zeros_like(weight, dtype=dtype) if wants_weight else None
        grad_bias = weight.new_zeros(len(weight), dtype=dtype) if wants_bias else None
        for rows in token_chunks(len(labels), len(weight), dtype, settings.chunk_bytes):
            log_p, slope = _log_softmax(hidden_states[rows], weight, bias, settings)
            grad = _grad_of_softmax(
                log_p, labels[rows], grad_log_probs[rows], None if grad_entropy is None else grad_entropy[rows]
            )
            grad.mul_(settings.scale / settings.temperature)
            if slope is not None:
                grad.mul_(slope)
            if grad_bias is not None:
                grad_bias.add_(grad.sum(0))
            grad = grad.to(weight.dtype)
            if grad_hidden is not None:
                torch.mm(grad, weight, out=grad_hidden[rows])
            if grad_weight is not None:
                add_product(grad_weight, grad.T, hidden_states[rows])
        return (
            grad_hidden,
            None if grad_weight is None else grad_weight.to(weight.dtype),
            None if grad_bias is None else grad_bias.to(weight.dtype),
            None,
            None,
        )


def token_chunks(num_tokens: int, vocab_size: int, dtype: torch.dtype, chunk_bytes: int) -> list[slice]:
    size = max(1, chunk_bytes // (vocab_size * dtype.itemsize))
    return [slice(start, min(start + size, num_tokens)) for start in range(0, num_tokens, size)]


def _log_softmax(
    hidden_states: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, settings: _Settings
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """log softmax [C, V] of a chunk, and the slope [C, V] of the softcap at its logits, if there is one."""
    logits = F.linear(hidden_states, weight, bias)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    slope = None
    if settings.softcap is not None:
        bounded = logits.mul(settings.scale / settings.softcap).tanh_()
        slope = 1.0 - bounded.square()
        logits = bounded.mul_(settings.softcap / settings.temperature)
    elif settings.scale != settings.temperature:
        logits = logits * (settings.scale / settings.temperature)
    # Not logit - logsumexp: it loses the digits that matter where the model is nearly certain and logits are large.
    return logits.log_softmax(-1), slope


def _grad_of_softmax(
    log_p: torch.Tensor, labels: torch.Tensor, grad_log_probs: torch.Tensor, grad_entropy: torch.Tensor | None
) -> torch.Tensor:
    """The gradient [C, V] in the logits z, from that in log p(label) and in the entropy S; overwrites `log_p`.

    d log p(y) / dz_j = [j = y] - p_j, and dS / dz_j = -p_j (log p_j + S).
    """
    p = log_p.exp()
    if grad_entropy is None:
        grad = p.mul_(-grad_log_probs.unsqueeze(-1))
    else:
        entropy = -torch.linalg.vecdot(p, log_p).unsqueeze(-1)
        weights = log_p.add_(entropy).mul_(grad_entropy.unsqueeze(-1)).add_(grad_log_probs.unsqueeze(-1))
        grad = weights.mul_(p).neg_()
    return grad.scatter_add_(-1, labels.unsqueeze(-1), grad_log_probs.unsqueeze(-1))


def add_product(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """total += a @ b, where `total` may be of a wider dtype."""
    if total.dtype == a.dtype:
        total.addmm_(a, b)
    else:
        total.add_(a @ b)
