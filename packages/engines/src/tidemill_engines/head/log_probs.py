"""Log-probabilities and entropy of tokens from hidden states, without materializing all logits."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from tidemill_engines.head.logits import LogitRule, LogitSlice
from tidemill_engines.head.softmax import SoftmaxParts, logit_gradients, softened
from tidemill_engines.head.top_k import GivenIds, MostProbable, TopK, add_gradients

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
        first_id: token id of the first row, for a rank that has a part of the vocabulary.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None = None
    scale: float = 1.0
    softcap: float | None = None
    first_id: int = 0


class HeadOutput(NamedTuple):
    """Outputs of the head for M tokens, in float32 (float64 for float64 hidden states), with gradient.

    Attributes:
        log_probs: [M], log-probability of each label.
        entropy: [M], in nats; None unless requested.
        topk_ids: [M, k] int32, the most probable ids in descending order, or the given ones; None unless requested.
        topk_log_probs: [M, k], log-probabilities of `topk_ids`.
    """

    log_probs: torch.Tensor
    entropy: torch.Tensor | None
    topk_ids: torch.Tensor | None
    topk_log_probs: torch.Tensor | None


def head_log_probs(
    hidden_states: torch.Tensor,
    head: Head,
    labels: torch.Tensor,
    *,
    temperature: float = 1.0,
    entropy: bool = False,
    top_k: int | None = None,
    topk_ids: torch.Tensor | None = None,
    chunk_bytes: int = CHUNK_BYTES,
    group: dist.ProcessGroup | None = None,
) -> HeadOutput:
    """Compute log-probabilities under softmax(logits / temperature) of the labels, and optionally of k other ids.

    The vocabulary is processed in chunks, and recomputed in the backward pass, so only the logits of all tokens for one
    chunk are in memory. Each chunk of the weight's gradient is one matrix product over all tokens; the gradient of the
    hidden states is a sum over chunks in float32. Differentiable once in hidden states, weight and bias.

    Args:
        hidden_states: [M, H] in the dtype of the head. Matrix products take this dtype and accumulate in float32 or
            wider, as does everything else: logits of a bfloat16 head are not rounded to bfloat16.
        labels: [M] int64.
        top_k: number of most probable ids to return with their log-probabilities; at most the size of the vocabulary.
        topk_ids: [M, k] integers, distinct for each token: ids whose log-probabilities are returned; exclude `top_k`.
        chunk_bytes: maximum bytes of the logits of a chunk in the dtype of the result; a chunk has at least one column.
        group: ranks that share the vocabulary: each has some rows of the head (see `Head.first_id`) and all hidden
            states. Results are the same on all ranks, and gradients of the hidden states are this rank's part of the
            sum. Collective in the forward pass.
    """
    rule = LogitRule(scale=head.scale, softcap=head.softcap, temperature=temperature)
    dtype = torch.promote_types(hidden_states.dtype, torch.float32)
    chosen: TopK | None = None
    if topk_ids is not None:
        chosen = GivenIds(topk_ids, dtype)
    elif top_k is not None:
        chosen = MostProbable(len(labels), top_k, dtype, hidden_states.device)
    log_probs, entropies, ids, topk_log_probs = _HeadLogProbs.apply(
        hidden_states, head.weight, head.bias, labels, chosen, rule, head.first_id, chunk_bytes, group
    )
    return HeadOutput(log_probs, entropies if entropy else None, ids, topk_log_probs)


class _HeadLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any,
        hidden_states: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        labels: torch.Tensor,
        chosen: TopK | None,
        rule: LogitRule,
        first_id: int,
        chunk_bytes: int,
        group: dist.ProcessGroup | None,
    ) -> tuple[torch.Tensor | None, ...]:
        dtype = torch.promote_types(hidden_states.dtype, torch.float32)
        parts = SoftmaxParts(len(labels), dtype, hidden_states.device)
        for chunk in _vocabulary_chunks(len(labels), len(weight), dtype, chunk_bytes):
            piece = _logits(hidden_states, weight, bias, chunk, first_id, dtype)
            if chosen is not None:
                chosen.add(piece)  # first, because parts.add overwrites the logits
            parts.add(piece, labels, rule)
            del piece
        if group is not None:
            parts.combine(group)
            if chosen is not None:
                chosen.combine(group)
        statistics = parts.statistics()
        topk_ids, topk_log_probs, slopes = None, None, None
        if chosen is not None:
            z, slope = softened(LogitSlice(chosen.logits, None, 0), rule)
            topk_log_probs = z - statistics[0].unsqueeze(-1) - statistics[1].unsqueeze(-1)
            topk_ids, slopes = chosen.ids.int(), torch.as_tensor(slope, dtype=dtype, device=z.device)
            ctx.mark_non_differentiable(topk_ids)
        # Save the original weight: FSDP frees its storage after the forward and refills it before the backward.
        ctx.save_for_backward(hidden_states, weight, bias, labels, statistics, topk_ids, slopes)
        ctx.settings = rule, first_id, chunk_bytes
        ctx.set_materialize_grads(False)
        return parts.log_probs(), statistics[2].clone(), topk_ids, topk_log_probs

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any,
        grad_log_probs: torch.Tensor | None,
        grad_entropy: torch.Tensor | None,
        _: torch.Tensor | None,
        grad_topk: torch.Tensor | None,
    ) -> tuple[torch.Tensor | None, ...]:
        hidden_states, weight, bias, labels, statistics, topk_ids, slopes = ctx.saved_tensors
        rule, first_id, chunk_bytes = ctx.settings
        wants_hidden, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        dtype = statistics.dtype
        # The kernels require contiguous gradients; those of a sum are expanded.
        grad_log_probs = torch.zeros_like(statistics[0]) if grad_log_probs is None else grad_log_probs.contiguous()
        grad_entropy = None if grad_entropy is None else grad_entropy.contiguous()
        grad_total = grad_log_probs if grad_topk is None else grad_log_probs + grad_topk.sum(-1)
        grad_hidden = torch.zeros_like(hidden_states, dtype=dtype) if wants_hidden else None
        grad_weight = torch.empty_like(weight) if wants_weight else None
        grad_bias = torch.empty_like(bias) if wants_bias else None
        for chunk in _vocabulary_chunks(len(labels), len(weight), dtype, chunk_bytes):
            piece = _logits(hidden_states, weight, bias, chunk, first_id, dtype)
            # Gradients of the k ids are added before rounding to the dtype of the weight: p - p_teacher is small.
            wide = weight.dtype if grad_topk is None else dtype
            grad = logit_gradients(piece, labels, statistics, grad_log_probs, grad_total, grad_entropy, rule, wide)
            if grad_topk is not None:
                add_gradients(grad, piece.first, topk_ids.long(), grad_topk * slopes)
                grad = grad.to(weight.dtype)
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
        return grad_hidden, grad_weight, grad_bias, *(None,) * 6


def _vocabulary_chunks(num_tokens: int, vocab_size: int, dtype: torch.dtype, chunk_bytes: int) -> list[slice]:
    """Return slices of the vocabulary, in multiples of 128, for which matrix products are fastest."""
    size = max(1, chunk_bytes // (max(num_tokens, 1) * dtype.itemsize))
    if size > 128:
        size -= size % 128
    return [slice(start, min(start + size, vocab_size)) for start in range(0, vocab_size, size)]


def _logits(
    hidden_states: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    chunk: slice,
    first_id: int,
    dtype: torch.dtype,
) -> LogitSlice:
    logits = _product(hidden_states, weight[chunk].T, dtype)
    return LogitSlice(logits, None if bias is None else bias[chunk], first_id + chunk.start)


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
