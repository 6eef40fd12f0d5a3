"""Advantages of VAPO."""

import numpy as np
import torch
from tidemill_dataproto import DataProto, ragged

from tidemill_algorithms.advantages.gae import temporal_differences
from tidemill_algorithms.columns import reads
from tidemill_algorithms.rewards import reward_reader
from tidemill_algorithms.trained_rows import TrainedRows, discounted_sums
from tidemill_algorithms.whitening import whiten

__all__ = ["vapo"]


@reads("values", token_rewards=True)
def vapo(
    batch: DataProto, *, gamma: float = 1.0, lam_critic: float = 1.0, lam_alpha: float = 0.05
) -> dict[str, torch.Tensor]:
    """Compute the advantages of `gae` with lam = 1 - 1 / (lam_alpha * length), and the returns with `lam_critic`.

    VAPO (Yue et al. 2025, arXiv:2504.05118): decoupled and length-adaptive GAE. The length is the number of trained
    tokens of the row, and lam is at least 0, which it is for rows of up to 1 / lam_alpha tokens.

    Args:
        batch: the columns of `gae`.
        gamma: discount per trained token.
        lam_critic: lam of the returns that the critic is trained on.
        lam_alpha: length relative to which lam adapts; positive.

    Returns:
        `advantages` and `returns` as `gae`.

    >>> critic = DataProto.from_dict({"values": ragged.like(torch.tensor([0.5, 0.5, 0.5, 0.5, 0.0, 0.5]), mask)})
    >>> columns = vapo(batch.union(critic), lam_alpha=1.0)
    >>> ragged.values(columns["returns"])
    tensor([1., 1., 0., 0., 0., 1.])
    >>> ragged.values(columns["advantages"])
    tensor([ 0.4268,  1.0178, -0.9522, -1.3462, -0.1642,  1.0178])
    """
    if lam_alpha <= 0:
        raise ValueError(f"lam_alpha must be > 0, got {lam_alpha}")
    response_mask, values, read_rewards = batch["response_mask"], batch["values"], reward_reader(batch)
    advantages, returns = (np.zeros(len(ragged.values(response_mask)), dtype=np.float32) for _ in range(2))
    for rows in TrainedRows.of(response_mask):
        value = rows.read(values)
        differences = temporal_differences(read_rewards(rows), value, gamma)
        lam = np.maximum(1 - 1 / (lam_alpha * np.maximum(rows.lengths, 1)), 0.0)[:, None]
        rows.write(discounted_sums(differences, gamma * lam), advantages)
        rows.write(discounted_sums(differences, gamma * lam_critic) + value, returns)
    return {
        "advantages": whiten(ragged.like(torch.from_numpy(advantages), response_mask), response_mask),
        "returns": ragged.like(torch.from_numpy(returns), response_mask),
    }
