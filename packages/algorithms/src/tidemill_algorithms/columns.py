"""The columns that an advantage estimator or a policy loss reads beyond those that every batch has."""

from collections.abc import Callable
from typing import Any, TypeVar

__all__ = ["columns_of", "reads", "uses_token_rewards"]

_F = TypeVar("_F", bound=Callable[..., Any])


def reads(*columns: str, token_rewards: bool = False) -> Callable[[_F], _F]:
    """Declare what a function reads beyond the basic columns.

    Those of an estimator are `response_mask`, `rewards`, `uid` and `episode`; those of a policy loss `response_mask`,
    `old_log_probs` and `advantages`.

    Args:
        columns: columns that it requires.
        token_rewards: an estimator that uses the column `token_level_rewards` in place of `rewards` where the batch has
            it.
    """

    def declare(function: _F) -> _F:
        function.__dict__.update(columns=columns, token_rewards=token_rewards)
        return function

    return declare


def columns_of(function: Callable[..., Any]) -> tuple[str, ...]:
    """Return the columns that an estimator or a loss requires beyond the basic ones; `values`: it requires a critic."""
    return function.__dict__.get("columns", ())


def uses_token_rewards(estimator: Callable[..., Any]) -> bool:
    """Return whether an estimator uses `token_level_rewards`, so that a KL penalty in the reward has an effect."""
    return estimator.__dict__.get("token_rewards", False)
