"""Advantages of REINFORCE++ and its form with a group baseline."""

import torch
from tidemill_dataproto import DataProto

from tidemill_algorithms.advantages.contract import outcome_groups
from tidemill_algorithms.columns import reads
from tidemill_algorithms.rewards import returns_to_go
from tidemill_algorithms.whitening import whiten

__all__ = ["reinforce_plus_plus", "reinforce_plus_plus_baseline"]


@reads(token_rewards=True)
def reinforce_plus_plus(batch: DataProto, *, gamma: float = 1.0) -> dict[str, torch.Tensor]:
    """Compute the return of each token, r_t + gamma * (return of the next trained token), whitened over the batch.

    REINFORCE++ (Hu 2025, arXiv:2501.03262). Groups do not matter: a group of one has its whitened return, as any group
    has, and equal rewards have advantage 0 only where all trained tokens of the batch have the same return.

    Args:
        batch: ragged `response_mask`, and `rewards` float [B] or ragged `token_level_rewards`.
        gamma: discount per trained token. The return is carried over other tokens unchanged.

    Returns:
        `advantages`, ragged float32 [B, j], 0 where the mask is 0, whitened as in `whiten`.

    >>> ragged.values(reinforce_plus_plus(batch)["advantages"])
    tensor([ 0.9129,  0.9129, -0.9129, -0.9129, -0.9129,  0.9129])
    """
    return {"advantages": whiten(returns_to_go(batch, gamma), batch["response_mask"])}


def reinforce_plus_plus_baseline(batch: DataProto) -> dict[str, torch.Tensor]:
    """Compute R - mean over the episodes of a problem, whitened over the trained tokens of the batch.

    REINFORCE++-baseline (Hu et al. 2025, arXiv:2501.03262). A group of one and a group of equal rewards have 0 before
    whitening, which then subtracts the mean over tokens: they have advantage 0 only where that mean is 0.

    Args:
        batch: the columns of `Groups.of`.

    Returns:
        `advantages`, ragged float32 [B, j], equal for all trained tokens of an episode, 0 where the mask is 0.

    >>> ragged.values(reinforce_plus_plus_baseline(batch)["advantages"])
    tensor([ 1.1866,  1.1866, -0.8476, -0.8476, -0.8476,  0.1695])
    """
    groups = outcome_groups(batch)
    return {"advantages": whiten(groups.to_tokens(groups.centred(groups.rewards)), groups.mask)}
