"""Advantages of ReMax."""

import torch
from tidemill_dataproto import DataProto

from tidemill_algorithms.advantages.contract import outcome_groups, reads

__all__ = ["remax"]


@reads("baseline_rewards")
def remax(batch: DataProto) -> dict[str, torch.Tensor]:
    """Compute the reward minus the reward of the greedy answer to the same problem.

    ReMax (Li et al. 2023, arXiv:2310.10505). The baseline needs one more, greedy episode of each problem, which is not
    part of the batch. Other episodes do not matter: a group of one has R - baseline, as any group has, and equal
    rewards have advantage 0 only where they equal the baseline.

    Args:
        batch: the columns of `Groups.of`, and `baseline_rewards`, float [B], the reward of the greedy episode.

    Returns:
        `advantages`, ragged float32 [B, j], 0 where the mask is 0.

    >>> greedy = DataProto.from_dict({"baseline_rewards": torch.tensor([1.0, 1.0, 0.0])})
    >>> ragged.values(remax(batch.union(greedy))["advantages"])
    tensor([ 0.,  0., -1., -1., -1.,  1.])
    """
    groups = outcome_groups(batch)
    baseline = torch.as_tensor(batch["baseline_rewards"]).double()
    return {"advantages": groups.to_tokens((batch["rewards"].double() - baseline)[groups.first])}
