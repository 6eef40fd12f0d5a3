"""Advantages of GDPO, for several rewards."""

from collections.abc import Sequence

import numpy as np
import torch
from tidemill_dataproto import DataProto

from tidemill_algorithms.advantages.contract import outcome_groups
from tidemill_algorithms.columns import reads

__all__ = ["gdpo"]


@reads("reward_components")
def gdpo(batch: DataProto, *, gdpo_reward_weights: Sequence[float] | None = None) -> dict[str, torch.Tensor]:
    """Normalize each of K rewards in its group as `grpo`, add them up with weights, and whiten over the episodes.

    GDPO (Liu et al. 2026, arXiv:2601.05242). The last step divides by the unbiased standard deviation over the E
    episodes of the batch, + 1e-6; their mean is 0. A group of one, and a group whose rewards are equal in each
    component, have advantage 0.

    Args:
        batch: the columns of `Groups.of`, and `reward_components`, float [B, K], equal in all rows of an episode.
        gdpo_reward_weights: weights of the K rewards; 1 for each if None.

    Returns:
        `advantages`, ragged float32 [B, j], equal for all tokens of an episode, 0 where the mask is 0.

    Raises:
        ValueError: not K weights, or reward_components that are not [B, K], not finite, or differ within an episode.

    >>> components = DataProto.from_dict({"reward_components": torch.tensor([[1.0, 0.0], [0.0, 0.5], [1.0, 1.0]])})
    >>> ragged.values(gdpo(batch.union(components), gdpo_reward_weights=[1.0, 0.5])["advantages"])
    tensor([ 1.0000,  1.0000, -1.0000, -1.0000, -1.0000,  0.0000])
    """
    groups = outcome_groups(batch)
    components = groups.of_episodes("reward_components", batch["reward_components"].double())
    if components.dim() != 2 or not components.isfinite().all():
        raise ValueError(
            f"expected reward_components [B, K] with finite values, got {list(components.shape)} from "
            f"{components.amin().item()} to {components.amax().item()}"
        )
    weights = [1.0] * components.shape[1] if gdpo_reward_weights is None else gdpo_reward_weights
    if len(weights) != components.shape[1]:
        raise ValueError(f"expected {components.shape[1]} gdpo_reward_weights, one per reward, got {len(weights)}")
    total = torch.zeros_like(groups.rewards)
    for weight, rewards in zip(weights, components.unbind(1), strict=True):
        total += weight * groups.centred(rewards) / (groups.std(rewards)[groups.group] + 1e-6)
    num_episodes = len(total) - int(np.asarray(batch.is_padding)[groups.first.numpy()].sum())
    spread = (total.square().sum() / max(num_episodes - 1, 1)).sqrt()
    return {"advantages": groups.to_tokens(total / (spread + 1e-6))}
