"""Advantages of on-policy RL with the optimal baseline."""

import torch
from tidemill_dataproto import DataProto

from tidemill_algorithms.advantages.contract import outcome_groups

__all__ = ["opo"]


def opo(batch: DataProto) -> dict[str, torch.Tensor]:
    """Compute the reward minus the mean reward of the problem weighted by the lengths of the episodes.

    OPO (Hao et al. 2025, arXiv:2505.23585): the baseline is sum(length * R) / sum(length), the minimum-variance
    baseline where the squared norm of an episode's gradient is proportional to its length. The length is the number of
    trained tokens in all rows of the episode. A group of one and a group of equal rewards have advantage 0.

    Args:
        batch: the columns of `Groups.of`.

    Returns:
        `advantages`, ragged float32 [B, j], equal for all tokens of an episode, 0 where the mask is 0.

    >>> ragged.values(opo(batch)["advantages"])
    tensor([ 0.6000,  0.6000, -0.4000, -0.4000, -0.4000,  0.0000])
    """
    groups = outcome_groups(batch)
    tokens = groups.sum(groups.lengths).clamp(min=1)  # a group without trained tokens has no baseline and needs none
    baseline = groups.sum(groups.lengths * groups.rewards) / tokens
    return {"advantages": groups.to_tokens(groups.rewards - baseline[groups.group])}
