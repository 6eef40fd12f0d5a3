"""How the metrics of micro-batches become those of the global batch."""

from collections.abc import Sequence

import torch
import torch.distributed as dist

from tidemill_engines.agreement import gather


def reduce_metrics(reports: Sequence[dict[str, torch.Tensor]], group: dist.ProcessGroup) -> dict[str, float]:
    """Adds up the metrics of micro-batches, here and over the ranks, in float64 and in rank order. Collective.

    Args:
        reports: the metrics of each micro-batch of this rank.

    Raises:
        ValueError: the ranks report different names; on every rank.
    """
    own: dict[str, float] = {}
    for report in reports:
        for name, value in report.items():
            own[name] = own.get(name, 0.0) + value.double().item()
    of_ranks = gather(own, group)
    for rank, report in enumerate(of_ranks):
        if report.keys() != of_ranks[0].keys():
            raise ValueError(
                f"the loss reported {sorted(of_ranks[0])} on rank 0 but {sorted(report)} on rank {rank}; "
                "it must report the same metrics for every micro-batch"
            )
    return {name: sum(report[name] for report in of_ranks) for name in of_ranks[0]}
