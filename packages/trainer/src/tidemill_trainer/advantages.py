"""Advantages from scores of whole responses."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch


def grpo_advantages(scores: torch.Tensor, uid: Sequence[Any] | np.ndarray, *, norm_by_std: bool) -> torch.Tensor:
    """Compute advantages relative to the other responses to the same prompt.

    GRPO (Shao et al. 2024, arXiv:2402.03300, eq. 3 with outcome rewards): (r - mean) / (std + 1e-6) with the unbiased
    standard deviation of the group; without `norm_by_std`, r - mean (Dr. GRPO, Liu et al. 2025, arXiv:2503.20783).

    Args:
        scores: float [B].
        uid: [B], equal for the responses to one prompt.
        norm_by_std: divide by the standard deviation of the group.

    Returns:
        float32 [B]; 0 if all scores of a group are equal.
    """
    group, counts, mean = _groups(scores, uid)
    centred = scores.double() - mean[group]
    if not norm_by_std:
        return centred.float()
    squares = torch.zeros_like(mean).index_add_(0, group, centred.square())
    std = (squares / (counts - 1).clamp(min=1)).sqrt()
    return (centred / (std[group] + 1e-6)).float()


def frac_zero_std_groups(scores: torch.Tensor, uid: Sequence[Any] | np.ndarray) -> float:
    """Return the fraction of groups whose scores are all equal, so that they have no gradient."""
    group, _, mean = _groups(scores, uid)
    differs = torch.zeros_like(mean).index_add_(0, group, (scores.double() - mean[group]).abs())
    return (differs <= 1e-6).float().mean().item()


def _groups(scores: torch.Tensor, uid: Sequence[Any] | np.ndarray) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the group of each row [B], and the size and mean score of each group.

    The mean is float64, so that equal scores minus their mean are 0 within 1e-6.
    """
    names, inverse = np.unique(np.asarray(uid, dtype=str), return_inverse=True)
    group = torch.from_numpy(inverse.astype(np.int64))
    counts = torch.bincount(group, minlength=len(names)).double()
    sums = torch.zeros(len(names), dtype=torch.float64).index_add_(0, group, scores.double())
    return group, counts, sums / counts
