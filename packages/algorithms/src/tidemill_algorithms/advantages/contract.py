"""The interface of an advantage estimator, and the columns that it reads."""

from collections.abc import Callable
from typing import TypeAlias, TypeVar

import torch
from tidemill_dataproto import DataProto

from tidemill_algorithms.groups import Groups

__all__ = ["Estimator", "columns_of", "outcome_groups", "reads", "uses_token_rewards"]

# (batch, *, options) -> ragged float32 columns of the layout of `response_mask`
Estimator: TypeAlias = Callable[..., dict[str, torch.Tensor]]
_E = TypeVar("_E", bound=Estimator)


def reads(*columns: str, token_rewards: bool = False) -> Callable[[_E], _E]:
    """Declare what an estimator reads beyond `response_mask`, `rewards`, `uid` and `episode`.

    Args:
        columns: columns that it requires.
        token_rewards: it uses the column `token_level_rewards` in place of `rewards` where the batch has it.
    """

    def declare(estimator: _E) -> _E:
        estimator.__dict__.update(columns=columns, token_rewards=token_rewards)
        return estimator

    return declare


def columns_of(estimator: Estimator) -> tuple[str, ...]:
    """Return the columns that an estimator requires beyond the basic ones; `values`: it requires a critic."""
    return estimator.__dict__.get("columns", ())


def uses_token_rewards(estimator: Estimator) -> bool:
    """Return whether an estimator uses `token_level_rewards`, so that a KL penalty in the reward has an effect."""
    return estimator.__dict__.get("token_rewards", False)


def outcome_groups(batch: DataProto) -> Groups:
    """Group the episodes of a batch for an estimator that reads one reward per episode.

    Raises:
        ValueError: as `refuse_token_rewards` and `Groups.of`.
    """
    refuse_token_rewards(batch)
    return Groups.of(batch)


def refuse_token_rewards(batch: DataProto) -> None:
    """Raise ValueError if the batch has `token_level_rewards`, which would have no effect."""
    if "token_level_rewards" in batch.batch.keys():  # noqa: SIM118
        raise ValueError(
            "expected `rewards` alone, got the column `token_level_rewards`, which this estimator does not use; choose "
            "one that does (gae, reinforce_plus_plus, remax, vapo), or pop the column"
        )
