"""Rewards of tokens, and penalties for length."""

from collections.abc import Callable

import numpy as np
import torch
from tidemill_dataproto import DataProto, ragged

from tidemill_algorithms import kl
from tidemill_algorithms.kl import KLPenalty
from tidemill_algorithms.trained_rows import TrainedRows, discounted_sums

__all__ = ["overlong_penalty", "returns_to_go", "reward_reader", "token_rewards"]


def token_rewards(batch: DataProto, *, kl_coef: float = 0.0, kl_penalty: KLPenalty = "kl") -> torch.Tensor:
    """Return the reward of each token: the outcome at the last trained token of each row, and a KL penalty at each.

    The penalty is -kl_coef * kl_penalty(old_log_probs, ref_log_prob) (Ziegler et al. 2019, arXiv:1909.08593, eq. 2). It
    has an effect with estimators for which `uses_token_rewards` is true; the others refuse the column. All rows of an
    episode get its reward. A row without trained tokens gets none.

    Args:
        batch: `rewards` float [B], ragged `response_mask` [B, j], and ragged float `old_log_probs` and `ref_log_prob`
            if kl_coef is not 0.
        kl_coef: coefficient of the penalty.
        kl_penalty: estimate of the KL divergence; see the function of this name. Only its value matters here.

    Returns:
        ragged float32 [B, j], for the column `token_level_rewards`; 0 where the mask is 0.

    >>> ragged.values(token_rewards(batch))
    tensor([0., 1., 0., 0., 0., 1.])
    >>> log_probs = {"old_log_probs": mask, "ref_log_prob": ragged.like(torch.full((6,), 0.5), mask)}
    >>> ragged.values(token_rewards(batch.union(DataProto.from_dict(log_probs)), kl_coef=0.1))
    tensor([-0.0500,  0.9500, -0.0500, -0.0500, -0.0500,  0.9500])
    """
    response_mask = batch["response_mask"]
    rewards = np.zeros(len(ragged.values(response_mask)), dtype=np.float32)
    for rows in TrainedRows.of(response_mask):
        padded = rows.outcome(batch["rewards"])
        if kl_coef != 0.0:
            old, ref = (torch.from_numpy(rows.read(batch[name])) for name in ("old_log_probs", "ref_log_prob"))
            padded -= kl_coef * kl.kl_penalty(old, ref, kl_penalty).numpy()
        rows.write(padded, rewards)
    return ragged.like(torch.from_numpy(rewards), response_mask)


def overlong_penalty(
    lengths: torch.Tensor, *, max_response_length: int, overlong_buffer_len: int, penalty_factor: float = 1.0
) -> torch.Tensor:
    """Return the penalty of long responses, to be added to their rewards.

    Soft overlong punishment of DAPO (Yu et al. 2025, arXiv:2503.14476, eq. 13) times `penalty_factor`: 0 up to a length
    of max_response_length - overlong_buffer_len, then linear to -penalty_factor at max_response_length and beyond.

    Args:
        lengths: int [B], tokens of the responses.
        max_response_length: tokens at which the penalty is full.
        overlong_buffer_len: tokens before it in which the penalty grows, 1 to max_response_length.
        penalty_factor: the full penalty.

    Returns:
        float32 [B], from -penalty_factor to 0.

    Raises:
        ValueError: another overlong_buffer_len.

    >>> overlong_penalty(torch.tensor([80, 85, 100]), max_response_length=100, overlong_buffer_len=20)
    tensor([ 0.0000, -0.2500, -1.0000])
    """
    if not 1 <= overlong_buffer_len <= max_response_length:
        raise ValueError(
            f"overlong_buffer_len must be from 1 to max_response_length={max_response_length}, got "
            f"{overlong_buffer_len}"
        )
    excess = lengths.double() - (max_response_length - overlong_buffer_len)
    share = (excess / overlong_buffer_len).clamp(0.0, 1.0)
    return torch.where(share > 0, -penalty_factor * share, 0.0).float()


def reward_reader(batch: DataProto) -> Callable[[TrainedRows], np.ndarray]:
    """Return a function that reads the rewards of tokens, float64 [b, T].

    These are the column `token_level_rewards` where the batch has one, else the outcome at the last trained token.

    Raises:
        ValueError: a reward that is not finite, or one at a token that is not trained, where it would have no effect.
    """
    if "token_level_rewards" not in batch.batch.keys():  # noqa: SIM118
        rewards = batch["rewards"]
        check_rewards("rewards", rewards)
        return lambda rows: rows.outcome(rewards)
    column, response_mask = batch["token_level_rewards"], batch["response_mask"]
    check_rewards("token_level_rewards", ragged.segment_sum(ragged.values(column), column))
    is_lost = (ragged.values(column) != 0) & ~ragged.values(response_mask).bool()
    if is_lost.any():
        row = int(torch.searchsorted(ragged.offsets(column), is_lost.nonzero()[0], right=True)) - 1
        raise ValueError(
            f"expected token_level_rewards of 0 where response_mask is 0, got another value in row {row}; move the "
            f"reward of an observation to the trained token before it"
        )
    return lambda rows: rows.read(column)


def check_rewards(name: str, rewards: torch.Tensor) -> None:
    """Raise ValueError if rewards, or sums of rewards, are not of shape [B], or one is not finite."""
    if rewards.dim() != 1:
        raise ValueError(f"expected one number per row in {name}, got shape {tuple(rewards.shape)}")
    if not rewards.isfinite().all():
        row = int((~rewards.isfinite()).nonzero()[0])
        raise ValueError(
            f"expected finite {name}, got {rewards[row].item()} in row {row}; drop the rows of failed episodes"
        )


def returns_to_go(batch: DataProto, gamma: float) -> torch.Tensor:
    """Return the discounted sum of the rewards from each trained token on, ragged float32 [B, j], 0 elsewhere.

    Tokens that are not trained do not count as time: the return is carried over them unchanged.
    """
    response_mask, read_rewards = batch["response_mask"], reward_reader(batch)
    returns = np.zeros(len(ragged.values(response_mask)), dtype=np.float32)
    for rows in TrainedRows.of(response_mask):
        rows.write(discounted_sums(read_rewards(rows), gamma), returns)
    return ragged.like(torch.from_numpy(returns), response_mask)
