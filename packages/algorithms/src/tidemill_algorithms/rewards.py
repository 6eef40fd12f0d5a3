"""Rewards of tokens, and penalties for length."""

import numpy as np
import torch
from tidemill_dataproto import DataProto, ragged

from tidemill_algorithms.trained_rows import TrainedRows, discounted_sums

__all__ = ["read_token_rewards", "returns_to_go", "token_rewards"]


def token_rewards(batch: DataProto) -> torch.Tensor:
    """Return the reward of each token: the outcome at the last trained token of each row.

    All rows of an episode get its reward. A row without trained tokens gets none.

    Args:
        batch: `rewards` float [B] and ragged `response_mask` [B, j].

    Returns:
        ragged float32 [B, j], for the column `token_level_rewards`.

    >>> ragged.values(token_rewards(batch))
    tensor([0., 1., 0., 0., 0., 1.])
    """
    response_mask = batch["response_mask"]
    mask = ragged.values(response_mask).bool()
    rewards = torch.zeros(len(mask))
    trained = mask.nonzero().squeeze(1)
    counts = ragged.segment_sum(mask.float(), response_mask).long()
    has_tokens = counts > 0
    rewards[trained[counts.cumsum(0)[has_tokens] - 1]] = batch["rewards"].float()[has_tokens]
    return ragged.like(rewards, response_mask)


def read_token_rewards(batch: DataProto) -> torch.Tensor:
    """Return the column `token_level_rewards` where the batch has one, else `token_rewards`.

    Raises:
        ValueError: a reward at a token that is not trained, where it would have no effect.
    """
    if "token_level_rewards" not in batch.batch.keys():  # noqa: SIM118
        return token_rewards(batch)
    column, response_mask = batch["token_level_rewards"], batch["response_mask"]
    is_lost = (ragged.values(column) != 0) & ~ragged.values(response_mask).bool()
    if is_lost.any():
        row = int(torch.searchsorted(ragged.offsets(column), is_lost.nonzero()[0], right=True)) - 1
        raise ValueError(
            f"expected token_level_rewards of 0 where response_mask is 0, got another value in row {row}; move the "
            f"reward of an observation to the trained token before it"
        )
    return column


def returns_to_go(batch: DataProto, gamma: float) -> torch.Tensor:
    """Return the discounted sum of the rewards from each trained token on, ragged float32 [B, j], 0 elsewhere.

    Tokens that are not trained do not count as time: the return is carried over them unchanged.
    """
    rewards = read_token_rewards(batch)
    returns = np.zeros(len(ragged.values(rewards)), dtype=np.float32)
    for rows in TrainedRows.of(batch["response_mask"]):
        rows.write(discounted_sums(rows.read(rewards), gamma), returns)
    return ragged.like(torch.from_numpy(returns), batch["response_mask"])
