"""The load-balancing loss of MoE models, for each row separately.

If ranks share the tokens of rows, each rank has the router logits of its own tokens, and sums over rows are sums over
these ranks.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from tidemill_dataproto import DataProto, ragged

from tidemill_engines.loss.contract import LossFn, Normalizer, checked_loss
from tidemill_engines.model_io import ModelInputs, Outputs

ROUTED_EXPERTS = "routed_experts"
"""Column with the experts of each token, for router replay."""


def row_balance_losses(
    router_logits: Sequence[torch.Tensor],
    cu_seqlens: torch.Tensor,
    top_k: int,
    group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    """Compute the load-balancing loss of Switch Transformers (arXiv:2101.03961, equations 4 to 6) of each row.

    It is E * sum_e(f_e * p_e), where f_e is the fraction of the row's tokens sent to expert e and p_e their mean router
    probability, both as means over tokens and layers. It is top_k if experts are used evenly. Computed over rows
    instead of micro-batches, it does not depend on how a batch is split.

    Args:
        router_logits: per layer [n, E], logits of this rank's part of the N tokens.
        cu_seqlens: [B + 1], bounds of the rows in N.
        top_k: number of experts per token.
        group: ranks that share the rows; None if this rank has all N tokens.

    Returns:
        [B], float32 or wider, the same on each rank of the group.
    """
    lengths = cu_seqlens.diff().long()
    row_of_token = torch.arange(len(lengths), device=lengths.device).repeat_interleave(lengths)
    if group is not None:
        row_of_token = row_of_token.chunk(dist.get_world_size(group))[dist.get_rank(group)]
    num_experts = router_logits[0].shape[-1]
    dtype = torch.promote_types(router_logits[0].dtype, torch.float32)
    sent, expected = router_logits[0].new_zeros(2, len(lengths), num_experts, dtype=dtype)
    for logits in router_logits:
        probabilities = logits.to(dtype).softmax(-1)
        chosen = torch.zeros_like(probabilities).scatter(-1, probabilities.topk(top_k, dim=-1).indices, 1.0)
        sent = sent.index_add(0, row_of_token, chosen)
        expected = expected.index_add(0, row_of_token, probabilities)
    if group is not None:
        sent, expected = _sum_over(sent, group), _sum_over(expected, group)
    tokens = (lengths * len(router_logits)).to(dtype)
    return num_experts * (sent * expected).sum(-1) / tokens.square()


def router_losses(
    router_logits: Sequence[torch.Tensor], inputs: ModelInputs, top_k: int, group: dist.ProcessGroup | None = None
) -> torch.Tensor:
    """Distribute `row_balance_losses` equally over the response tokens [M] of each row."""
    ends = inputs.layout.cu_seqlens[1:].long()
    first = 0 if group is None else dist.get_rank(group) * inputs.input_ids.shape[1]
    row_of_output = torch.searchsorted(ends, inputs.predictors + first, right=True)
    of_rows = row_balance_losses(router_logits, inputs.layout.cu_seqlens, top_k, group)
    outputs_per_row = torch.bincount(row_of_output, minlength=len(ends)).to(of_rows.dtype)
    if group is not None:
        outputs_per_row = _sum_over(outputs_per_row, group)
    return (of_rows / outputs_per_row.clamp(min=1))[row_of_output]


def router_logits_of_outputs(router_logits: Sequence[torch.Tensor], inputs: ModelInputs) -> torch.Tensor:
    """Select the logits [n, E] of L layers at the tokens that predict response tokens, as [M, L, E]."""
    return torch.stack([logits[inputs.predictors] for logits in router_logits], 1)


def connect_to_output(router_logits: Sequence[torch.Tensor], hidden_states: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the same logits [n, E], connected to the final hidden states [1, n, H] by a zero gradient.

    A sharded layer all-gathers its weights for the backward pass when the gradient of its output arrives. A loss that
    depends only on the router would not cause one.

    Raises:
        ValueError: logits of another shape; transformers records other tensors for some models.
    """
    shapes = [tuple(logits.shape) for logits in router_logits]
    if any(len(shape) != 2 or shape[0] != hidden_states.shape[1] for shape in shapes):
        raise ValueError(
            f"expected router logits of shape [{hidden_states.shape[1]}, experts] from each layer, got {shapes}, which "
            "transformers records for this model; leave ModelConfig.router_aux_loss_coef and output_router_logits at "
            "their defaults"
        )
    *others, last = router_logits
    tied = _ConnectToOutput.apply(last, hidden_states)
    assert isinstance(tied, torch.Tensor)
    return *others, tied


class _ConnectToOutput(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.save_for_backward(hidden_states)
        return logits.view_as(logits)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # pyright: ignore[reportIncompatibleMethodOverride]
        [hidden_states] = ctx.saved_tensors
        return grad, torch.zeros_like(hidden_states)


def _sum_over(own: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    total = _Sum.apply(own, group)
    assert isinstance(total, torch.Tensor)
    return total


class _Sum(torch.autograd.Function):
    """Sum over ranks. Each rank contributes its own part of the loss, so gradients are summed too."""

    @staticmethod
    def forward(ctx: Any, own: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.group = group
        total = own.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        total = grad.clone()
        dist.all_reduce(total, group=ctx.group)
        return total, None


def with_router_loss(loss_fn: LossFn, coefficient: float) -> LossFn:
    """Return a loss that adds `coefficient` times the mean balance loss of the trained rows.

    It reports this mean as the metric "router_loss".
    """

    def loss(output: Outputs, micro_batch: DataProto, normalizer: Normalizer) -> tuple[torch.Tensor, dict[str, Any]]:
        own, metrics = checked_loss(loss_fn(output, micro_batch, normalizer))
        if "router_loss" in metrics:
            raise ValueError("the loss reports a metric under the engine's own name 'router_loss'; rename it")
        assert output.router_loss is not None
        column = micro_batch["response_mask"]
        is_trained = ragged.segment_sum((ragged.values(column) != 0).to(output.router_loss.dtype), column) > 0
        of_rows = ragged.segment_sum(output.router_loss, column)
        mean = (of_rows * is_trained).sum() / normalizer.num_sequences
        return own + coefficient * mean, {**metrics, "router_loss": mean}

    return loss
