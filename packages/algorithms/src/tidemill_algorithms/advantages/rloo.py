"""Advantages of REINFORCE with a leave-one-out baseline."""

import torch
from tidemill_dataproto import DataProto

from tidemill_algorithms.advantages.contract import outcome_groups

__all__ = ["rloo"]


def rloo(batch: DataProto) -> dict[str, torch.Tensor]:
    """Compute the reward minus the mean reward of the other episodes of the problem.

    RLOO (Ahmadian et al. 2024, arXiv:2402.14740), in the form n / (n - 1) * (R - mean) for n episodes. A group
    of one, which has no baseline, and a group of equal rewards have advantage 0.

    Args:
        batch: the columns of `Groups.of`.

    Returns:
        `advantages`, ragged float32 [B, j], equal for all tokens of an episode, 0 where the mask is 0.

    >>> ragged.values(rloo(batch)["advantages"])
    tensor([ 1.,  1., -1., -1., -1.,  0.])
    """
    groups = outcome_groups(batch)
    scale = groups.counts / (groups.counts - 1).clamp(min=1)
    return {"advantages": groups.to_tokens(groups.centred(groups.rewards) * scale[groups.group])}
