"""Generalized advantage estimation."""

import numpy as np
import torch
from tidemill_dataproto import DataProto, ragged

from tidemill_algorithms.columns import reads
from tidemill_algorithms.rewards import reward_reader
from tidemill_algorithms.trained_rows import TrainedRows, discounted_sums
from tidemill_algorithms.whitening import whiten

__all__ = ["gae", "temporal_differences"]


@reads("values", token_rewards=True)
def gae(batch: DataProto, *, gamma: float = 1.0, lam: float = 1.0) -> dict[str, torch.Tensor]:
    """Compute A_t = d_t + gamma * lam * A_(t+1) with d_t = r_t + gamma * V_(t+1) - V_t, whitened over the batch.

    GAE (Schulman et al. 2015, arXiv:1506.02438, eq. 16), with whitened advantages as in PPO's implementations. t + 1 is
    the next trained token: values and advantages are carried over other tokens unchanged, and the value after the last
    is 0. Groups do not matter: a group of one and equal rewards are no special cases.

    Args:
        batch: ragged `response_mask`, ragged `values` of the critic, and `rewards` float [B] or ragged
            `token_level_rewards`.
        gamma: discount per trained token.
        lam: weight of longer sums, from 0 (one step) to 1 (the return minus the value).

    Returns:
        `advantages`, whitened as in `whiten`, and `returns`, A_t + V_t before whitening, for the critic; ragged float32
        [B, j], 0 where the mask is 0.

    >>> critic = DataProto.from_dict({"values": ragged.like(torch.tensor([0.5, 0.5, 0.5, 0.5, 0.0, 0.5]), mask)})
    >>> columns = gae(batch.union(critic), lam=0.5)
    >>> ragged.values(columns["returns"])
    tensor([0.7500, 1.0000, 0.2500, 0.0000, 0.0000, 1.0000])
    >>> ragged.values(columns["advantages"])
    tensor([ 0.4082,  1.0206, -0.8165, -1.4289, -0.2041,  1.0206])
    """
    response_mask, values, read_rewards = batch["response_mask"], batch["values"], reward_reader(batch)
    advantages, returns = (np.zeros(len(ragged.values(response_mask)), dtype=np.float32) for _ in range(2))
    for rows in TrainedRows.of(response_mask):
        value = rows.read(values)
        advantage = discounted_sums(temporal_differences(read_rewards(rows), value, gamma), gamma * lam)
        rows.write(advantage, advantages)
        rows.write(advantage + value, returns)
    return {
        "advantages": whiten(ragged.like(torch.from_numpy(advantages), response_mask), response_mask),
        "returns": ragged.like(torch.from_numpy(returns), response_mask),
    }


def temporal_differences(reward: np.ndarray, value: np.ndarray, gamma: float) -> np.ndarray:
    """Return r_t + gamma * V_(t+1) - V_t, all float64 [b, T]; the value after the last token is 0."""
    differences = reward - value
    differences[:, :-1] += gamma * value[:, 1:]
    return differences
