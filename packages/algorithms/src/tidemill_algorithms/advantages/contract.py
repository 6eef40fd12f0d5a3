"""The interface of an advantage estimator."""

from collections.abc import Callable
from typing import TypeAlias

import torch
from tidemill_dataproto import DataProto

from tidemill_algorithms.groups import Groups

__all__ = ["Estimator", "outcome_groups"]

# (batch, *, options) -> ragged float32 columns of the layout of `response_mask`
Estimator: TypeAlias = Callable[..., dict[str, torch.Tensor]]


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
