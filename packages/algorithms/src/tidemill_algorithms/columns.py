"""Columns: those that an estimator or a policy loss reads beyond those of every batch, and their values in a loss."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from tidemill_dataproto import DataProto, ragged

__all__ = ["columns_of", "reads", "uses_token_rewards", "values_per_token"]

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


def values_per_token(batch: DataProto, name: str, outputs: torch.Tensor) -> torch.Tensor:
    """Return the flat values of a column after comparing their shape with the outputs of the model [N].

    Raises:
        ValueError: another shape, whose product with the outputs would be broadcast.
    """
    values = ragged.values(batch[name])
    if values.shape != outputs.shape:
        raise ValueError(
            f"column {name} must have one value for each response token, {tuple(outputs.shape)} in total; got "
            f"{tuple(values.shape)}. Pass a ragged column like responses"
        )
    return values
