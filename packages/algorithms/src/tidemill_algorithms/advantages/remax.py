"""Advantages of ReMax."""

import numpy as np
import torch
from tidemill_dataproto import DataProto, ragged

from tidemill_algorithms.columns import reads
from tidemill_algorithms.rewards import check_rewards, reward_reader
from tidemill_algorithms.trained_rows import TrainedRows, discounted_sums

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
    response_mask, read_rewards = batch["response_mask"], reward_reader(batch)
    baselines = torch.as_tensor(batch["baseline_rewards"]).double()
    check_rewards("baseline_rewards", baselines)
    advantages = np.zeros(len(ragged.values(response_mask)), dtype=np.float32)
    for rows in TrainedRows.of(response_mask):
        returns = discounted_sums(read_rewards(rows), 1.0)
        rows.write(returns - baselines.numpy()[rows.rows, None], advantages)
    return {"advantages": ragged.like(torch.from_numpy(advantages), response_mask)}
