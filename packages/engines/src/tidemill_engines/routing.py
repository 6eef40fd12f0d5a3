"""How evenly a mixture of experts is used, and the loss that keeps it even, for each row by itself."""

from collections.abc import Sequence
from typing import Any

import torch
from tidemill_dataproto import DataProto, ragged

from tidemill_engines.losses import LossFn, ModelOutput, Normalizer
from tidemill_engines.packing import ModelInputs


def row_balance_losses(router_logits: Sequence[torch.Tensor], cu_seqlens: torch.Tensor, top_k: int) -> torch.Tensor:
    """The load-balancing loss of Switch Transformers (arXiv:2101.03961, equations 4 to 6) of each row.

    It is E * sum_e(f_e * p_e): f_e is how many of the row's tokens are sent to expert e, p_e the probability that they
    are, both as means over tokens and layers. It is top_k where experts are used evenly. Taken over rows, not over
    micro-batches, it does not depend on how a batch is split.

    Args:
        router_logits: per layer [N, E].
        cu_seqlens: [B + 1], where the rows begin and end in N.
        top_k: experts that a token is sent to.

    Returns:
        [B], float32 at least.
    """
    lengths = cu_seqlens.diff().long()
    row_of_token = torch.arange(len(lengths), device=lengths.device).repeat_interleave(lengths)
    num_experts = router_logits[0].shape[-1]
    dtype = torch.promote_types(router_logits[0].dtype, torch.float32)
    sent, expected = router_logits[0].new_zeros(2, len(lengths), num_experts, dtype=dtype)
    for logits in router_logits:
        probabilities = logits.to(dtype).softmax(-1)
        chosen = torch.zeros_like(probabilities).scatter(-1, probabilities.topk(top_k, dim=-1).indices, 1.0)
        sent = sent.index_add(0, row_of_token, chosen)
        expected = expected.index_add(0, row_of_token, probabilities)
    tokens = (lengths * len(router_logits)).to(dtype)
    return num_experts * (sent * expected).sum(-1) / tokens.square()


def router_losses(router_logits: Sequence[torch.Tensor], inputs: ModelInputs, top_k: int) -> torch.Tensor:
    """`row_balance_losses` as a column of the response tokens [M]: each has an equal part of its row's loss."""
    ends = inputs.layout.cu_seqlens[1:].long()
    row_of_output = torch.searchsorted(ends, inputs.predictors, right=True)
    outputs_per_row = torch.bincount(row_of_output, minlength=len(ends))
    of_rows = row_balance_losses(router_logits, inputs.layout.cu_seqlens, top_k)
    return (of_rows / outputs_per_row.clamp(min=1))[row_of_output]


def with_router_loss(loss_fn: LossFn, coefficient: float) -> LossFn:
    """A loss that also has `coefficient` times the mean balance loss of the rows that are trained on.

    It reports that mean as the metric "router_loss".
    """

    def loss(
        output: ModelOutput, micro_batch: DataProto, normalizer: Normalizer
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        own, metrics = loss_fn(output, micro_batch, normalizer)
        if "router_loss" in metrics:
            raise ValueError("the loss reports a metric under the engine's own name 'router_loss'; rename it")
        assert output.router_loss is not None
        column = micro_batch["response_mask"]
        is_trained = ragged.segment_sum((ragged.values(column) != 0).to(output.router_loss.dtype), column) > 0
        of_rows = ragged.segment_sum(output.router_loss, column)
        mean = (of_rows * is_trained).sum() / normalizer.num_sequences
        return own + coefficient * mean, {**metrics, "router_loss": mean}

    return loss
