"""Outputs of micro-batches, and their reduction to the output of a batch."""

from dataclasses import dataclass

import torch
import torch.distributed as dist

from tidemill_engines.batch.micro_batches import BatchPlan
from tidemill_engines.loss.contract import LossFn, MicroBatchLoss, checked_loss
from tidemill_engines.loss.metrics import Metric, reduce_metrics
from tidemill_engines.model_io import Outputs


@dataclass(frozen=True, kw_only=True, slots=True)
class StepOutput:
    """Result of `forward_step` for one micro-batch: 0-d loss and metrics (detached), and the model output."""

    loss: torch.Tensor | None
    metrics: dict[str, Metric]
    model_output: Outputs


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchOutput:
    """Result of `forward_backward_batch`.

    Attributes:
        metrics: metrics, and "loss" if there is a loss function, reduced over micro-batches and data-parallel ranks;
            the same on every rank.
        columns: outputs of the model by name, such as "log_probs", shaped like `responses`, in row order, on the CPU;
            after a backward pass empty, unless they were requested.
    """

    metrics: dict[str, float]
    columns: dict[str, torch.Tensor]


def collect(
    steps: list[StepOutput],
    plan: BatchPlan,
    group: dist.ProcessGroup,
    *,
    data_parallel_rank: int,
    with_outputs: bool,
) -> BatchOutput:
    """Reduce loss and metrics over micro-batches and ranks, and restore the row order of the outputs. Collective.

    Args:
        group: gloo group of all ranks.
        data_parallel_rank: which part of the global batch this rank works on.
        with_outputs: whether to return the outputs of the model.
    """
    reports = [{"loss": Metric.sum(step.loss), **step.metrics} for step in steps if step.loss is not None]
    metrics = reduce_metrics(reports, group, data_parallel_rank) if reports else {}
    if not with_outputs:
        return BatchOutput(metrics=metrics, columns={})
    parts = [step.model_output.columns() for step in steps]  # in training with router_loss, a part of the engine's loss
    return BatchOutput(
        metrics=metrics,
        columns={
            name: plan.restore([part[name].cpu() for part in parts]) for name in parts[0] if name != "router_loss"
        },
    )


def with_normalizer(loss_fn: LossFn | None, plan: BatchPlan) -> MicroBatchLoss | None:
    """Bind the normalizer of the batch to a loss, and check its results."""
    if loss_fn is None:
        return None
    normalizer = plan.normalizer
    assert normalizer is not None
    return lambda output, micro_batch: checked_loss(loss_fn(output, micro_batch, normalizer))
