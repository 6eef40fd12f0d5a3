"""Advantages of GRPO and Dr. GRPO."""

import torch
from tidemill_dataproto import DataProto

from tidemill_algorithms.advantages.contract import outcome_groups

__all__ = ["grpo"]


def grpo(batch: DataProto, *, norm_adv_by_std_in_grpo: bool = True) -> dict[str, torch.Tensor]:
    """Compute (R - mean) / (std + 1e-6) over the episodes of a problem, equal for all tokens of an episode.

    GRPO (Shao et al. 2024, arXiv:2402.03300, eq. 3 with outcome rewards) with the unbiased standard deviation. A group
    of one and a group of equal rewards have advantage 0.

    Args:
        batch: the columns of `Groups.of`.
        norm_adv_by_std_in_grpo: divide by the standard deviation; without it, this is R - mean (Dr. GRPO, Liu et al.
            2025, arXiv:2503.20783, which also sums the loss over tokens: aggregation `seq-mean-token-sum-norm`).

    Returns:
        `advantages`, ragged float32 [B, j], 0 where the mask is 0.

    >>> ragged.values(grpo(batch)["advantages"])
    tensor([ 0.7071,  0.7071, -0.7071, -0.7071, -0.7071,  0.0000])
    >>> ragged.values(grpo(batch, norm_adv_by_std_in_grpo=False)["advantages"])
    tensor([ 0.5000,  0.5000, -0.5000, -0.5000, -0.5000,  0.0000])
    """
    groups = outcome_groups(batch)
    advantages = groups.centred(groups.rewards)
    if norm_adv_by_std_in_grpo:
        advantages = advantages / (groups.std(groups.rewards)[groups.group] + 1e-6)
    return {"advantages": groups.to_tokens(advantages)}
