"""Advantages of ReMax."""

import torch
from tidemill_dataproto import DataProto, ragged

from tidemill_algorithms.advantages.contract import reads
from tidemill_algorithms.rewards import returns_to_go

__all__ = ["remax"]


@reads("baseline_rewards", token_rewards=True)
def remax(batch: DataProto) -> dict[str, torch.Tensor]:
    """Compute the return of each token minus the reward of the greedy answer to the same problem.

    ReMax (Li et al. 2023, arXiv:2310.10505). The return is the undiscounted sum of the rewards from the token on. The
    baseline needs one more, greedy episode of each problem, which is not part of the batch. Other episodes do not
    matter: a group of one has R - baseline, as any group has, and equal rewards have advantage 0 only where they equal
    the baseline.

    Args:
        batch: ragged `response_mask`, `rewards` float [B] or ragged `token_level_rewards`, and `baseline_rewards`,
            float [B], the reward of the greedy episode of the row's problem.

    Returns:
        `advantages`, ragged float32 [B, j], 0 where the mask is 0.

    >>> greedy = DataProto.from_dict({"baseline_rewards": torch.tensor([1.0, 1.0, 0.0])})
    >>> ragged.values(remax(batch.union(greedy))["advantages"])
    tensor([ 0.,  0., -1., -1., -1.,  1.])
    """
    returns, response_mask = returns_to_go(batch, gamma=1.0), batch["response_mask"]
    baseline = torch.as_tensor(batch["baseline_rewards"]).float()
    advantages = ragged.values(returns) - ragged.expand_rows(baseline, response_mask)
    is_masked = ~ragged.values(response_mask).bool()
    return {"advantages": ragged.like(advantages.masked_fill_(is_masked, 0.0), response_mask)}
