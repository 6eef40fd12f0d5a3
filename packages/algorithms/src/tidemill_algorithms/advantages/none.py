"""The estimator of losses that use no advantages."""

import torch
from tidemill_dataproto import DataProto, ragged

from tidemill_algorithms.advantages.contract import refuse_token_rewards

__all__ = ["none"]


def none(batch: DataProto) -> dict[str, torch.Tensor]:
    """Return advantages of 0, for a loss that uses none, such as `forward_kl_topk`. The rewards have no effect.

    Args:
        batch: ragged `response_mask`.

    Returns:
        `advantages`, ragged float32 [B, j].

    Raises:
        ValueError: the batch has `token_level_rewards`, which would have no effect.

    >>> ragged.values(none(batch)["advantages"])
    tensor([0., 0., 0., 0., 0., 0.])
    """
    refuse_token_rewards(batch)
    response_mask = batch["response_mask"]
    return {"advantages": ragged.like(torch.zeros(len(ragged.values(response_mask))), response_mask)}
