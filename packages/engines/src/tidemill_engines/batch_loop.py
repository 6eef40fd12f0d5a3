"""What any engine does with the micro-batches of a batch: their loss, and what they brought, put together."""

import torch.distributed as dist

from tidemill_engines.base import BatchOutput, MicroBatchLoss, StepOutput
from tidemill_engines.losses import LossFn, checked_loss
from tidemill_engines.metrics import Metric, reduce_metrics
from tidemill_engines.micro_batches import BatchPlan


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
