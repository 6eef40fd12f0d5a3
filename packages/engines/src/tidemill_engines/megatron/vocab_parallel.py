"""Log-probabilities and entropy where each rank has some rows of the head; logits are never gathered."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from tidemill_engines.log_probs import CHUNK_BYTES, add_product, token_chunks


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class VocabShard:
    """What this rank has of the head.

    Attributes:
        weight: [R, H], its rows, with those that pad the vocabulary.
        first: which token of the vocabulary the first row is.
        num_tokens: rows that are tokens; those behind them are padding.
        group: the ranks that have the vocabulary together.
    """

    weight: torch.Tensor
    first: int
    num_tokens: int
    group: dist.ProcessGroup


def vocab_parallel_log_probs(
    hidden_states: torch.Tensor,
    head: VocabShard,
    labels: torch.Tensor,
    *,
    temperature: float = 1.0,
    entropy: bool = False,
    chunk_bytes: int = CHUNK_BYTES,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """As `head_log_probs`, the softmax going over the rows of all ranks. Collective over `head.group`.

    Args:
        hidden_states: [M, H], the same on all ranks. The gradient that flows back into them is this rank's share: that
            of the model is the sum over the ranks, which Megatron's regions take care of.
        labels: [M] int64, the same on all ranks.
        chunk_bytes: what this rank's logits of a chunk may take in the dtype of the result.

    Returns:
        log_probs [M] and entropy in nats [M] or None, in float32 (float64 for float64 hidden states); the same on all
        ranks.
    """
    out = _VocabParallelLogProbs.apply(hidden_states, head.weight, labels, head, temperature, entropy, chunk_bytes)
    assert isinstance(out, tuple)
    return out


class _VocabParallelLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any,
        hidden_states: torch.Tensor,
        weight: torch.Tensor,
        labels: torch.Tensor,
        head: VocabShard,
        temperature: float,
        entropy: bool,
        chunk_bytes: int,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        dtype = torch.promote_types(hidden_states.dtype, torch.float32)
        # Rows: log p(label), the entropy, and what makes log p of logits: the largest one and the logarithm of the sum.
        out = hidden_states.new_empty(4, len(labels), dtype=dtype)
        for rows in token_chunks(len(labels), len(weight), dtype, chunk_bytes):
            logits = _logits(hidden_states[rows], weight, head.num_tokens, temperature)
            largest = F.pad(logits, (0, 1), value=-torch.inf).amax(-1)  # a rank may have padding only
            dist.all_reduce(largest, dist.ReduceOp.MAX, group=head.group)
            logits.sub_(largest.unsqueeze(-1))
            total = logits.exp().sum(-1)
            dist.all_reduce(total, group=head.group)
            log_p = logits.sub_(total.log().unsqueeze(-1))
            own, index = _own_labels(labels[rows], head)
            label = F.pad(log_p, (0, 1)).gather(-1, index).squeeze(-1).where(own, 0.0)
            shares = torch.stack([label, -(log_p.exp() * log_p).sum(-1) if entropy else torch.zeros_like(label)])
            dist.all_reduce(shares, group=head.group)
            out[:, rows] = torch.cat([shares, torch.stack([largest, total.log()])])
        ctx.save_for_backward(hidden_states, weight, labels, out)
        ctx.settings = head, temperature, chunk_bytes
        return out[0].clone(), out[1].clone() if entropy else None

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, grad_log_probs: torch.Tensor, grad_entropy: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        hidden_states, weight, labels, out = ctx.saved_tensors
        head, temperature, chunk_bytes = ctx.settings
        grad_hidden = torch.empty_like(hidden_states)
        grad_weight = torch.zeros_like(weight, dtype=out.dtype)
        for rows in token_chunks(len(labels), len(weight), out.dtype, chunk_bytes):
            log_p = _logits(hidden_states[rows], weight, head.num_tokens, temperature)
            log_p.sub_(out[2, rows, None]).sub_(out[3, rows, None])
            # d log p(y) / dz_j = [j = y] - p_j, and dS / dz_j = -p_j (log p_j + S)
            weights = grad_log_probs[rows, None].expand_as(log_p)
            if grad_entropy is not None:
                weights = weights + grad_entropy[rows, None] * (log_p + out[1, rows, None])
            grad = F.pad(log_p.exp().mul_(weights).neg_(), (0, 1))
            own, index = _own_labels(labels[rows], head)
            grad.scatter_add_(-1, index, grad_log_probs[rows].where(own, 0.0).unsqueeze(-1))
            grad = grad[:, :-1].div_(temperature).to(weight.dtype)
            torch.mm(grad, weight[: head.num_tokens], out=grad_hidden[rows])
            add_product(grad_weight[: head.num_tokens], grad.T, hidden_states[rows])
        return grad_hidden, grad_weight.to(weight.dtype), None, None, None, None, None


def _logits(hidden_states: torch.Tensor, weight: torch.Tensor, num_tokens: int, temperature: float) -> torch.Tensor:
    logits = F.linear(hidden_states, weight[:num_tokens])
    return logits.to(torch.promote_types(logits.dtype, torch.float32)).div(temperature)


def _own_labels(labels: torch.Tensor, head: VocabShard) -> tuple[torch.Tensor, torch.Tensor]:
    """Which labels are among this rank's tokens [C], and their rows [C, 1]; one row further for the others."""
    index = labels - head.first
    own = (index >= 0) & (index < head.num_tokens)
    return own, index.where(own, head.num_tokens).unsqueeze(-1)
