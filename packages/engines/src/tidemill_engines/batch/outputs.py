"""What any engine does with the micro-batches of a batch: their loss, and what they brought, put together."""

from dataclasses import dataclass

import torch
import torch.distributed as dist

from tidemill_engines.batch.micro_batches import BatchPlan
from tidemill_engines.loss.contract import LossFn, MicroBatchLoss, checked_loss
from tidemill_engines.loss.metrics import Metric, reduce_metrics
from tidemill_engines.model_io import Outputs


@dataclass(frozen=True, kw_only=True, slots=True)
class StepOutput:
    """What `forward_step` brings back from one micro-batch: 0-d loss and metrics (detached), and the model output."""

    loss: torch.Tensor | None
    metrics: dict[str, Metric]
    model_output: Outputs


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchOutput:
    """What `forward_backward_batch` brings back from a batch.

    Attributes:
        metrics: reduced over micro-batches and data-parallel ranks, the same on each of them; holds "loss" if there
            was a loss function.
        columns: the outputs of the model by name, such as "log_probs", shaped like `responses`, in the order of the
            rows, on the CPU; none after a backward.
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
    """Reduces loss and metrics over micro-batches and ranks, and brings outputs into the order of the rows. Collective.

    Args:
        group: of gloo, over all ranks.
        data_parallel_rank: which part of the global batch this rank works on.
        with_outputs: whether the outputs of the model are wanted.
    """
    reports = [{"loss": Metric.sum(step.loss), **step.metrics} for step in steps if step.loss is not None]
    metrics = reduce_metrics(reports, group, data_parallel_rank) if reports else {}
    if not with_outputs:
        return BatchOutput(metrics=metrics, columns={})
    parts = [step.model_output.columns() for step in steps]
    return BatchOutput(
        metrics=metrics,
        columns={name: plan.restore([part[name].cpu() for part in parts]) for name in parts[0]},
    )


def with_normalizer(loss_fn: LossFn | None, plan: BatchPlan) -> MicroBatchLoss | None:
    if loss_fn is None:
        return None
    normalizer = plan.normalizer
    assert normalizer is not None
    return lambda output, micro_batch: checked_loss(loss_fn(output, micro_batch, normalizer))
