"""The geometric mean of clipped ratios of GMPO."""

import math

import torch
from tidemill_dataproto import DataProto, ragged

from tidemill_algorithms.losses.contract import log_ratio_of, require_not_negative, row_mean, shared_metrics

__all__ = ["geo_mean"]


def geo_mean(
    log_probs: torch.Tensor, batch: DataProto, *, clip_ratio_low: float = 0.33, clip_ratio_high: float = 0.49
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Compute -A times the geometric mean of the ratios of a row's tokens, each clipped where A would push it further.

    GMPO (Zhao et al. 2025, arXiv:2507.20673, eq. 4). A token's ratio is bounded above for A > 0 and below for A < 0;
    a token at its bound has no gradient. The defaults are the paper's range, exp(-0.4) to exp(0.4); verl reads these
    options as bounds of the log ratio. As in `gspo`, each token has its own advantage and weight, and with equal ones
    in a row the gradient is that of the geometric mean. The mean log ratio is at most 10.

    The paper's aggregation is `seq-mean-token-mean`.

    Args:
        log_probs: [N], of the current policy; a row must not be split.
        batch: ragged `response_mask`, `old_log_probs` and `advantages`.
        clip_ratio_low: distance of the lower bound of a token's ratio from 1, < 1.
        clip_ratio_high: distance of the upper bound of a token's ratio from 1.

    Returns:
        Terms [N]; metrics `actor/ppo_kl` and `actor/pg_clipfrac`.

    >>> log_probs = torch.tensor([1.0, 4.0, 1.1, 1.1, 1.1, 1.0]).log()
    >>> geo_mean(log_probs, on_policy, clip_ratio_high=0.44)[0]  # the second ratio counts as 1.44
    tensor([-1.2000, -1.2000,  1.1000,  1.1000,  1.1000, -1.0000])
    """
    require_not_negative(clip_ratio_low=clip_ratio_low, clip_ratio_high=clip_ratio_high)
    if clip_ratio_low >= 1:
        raise ValueError(f"clip_ratio_low must be < 1, so that its logarithm exists, got {clip_ratio_low}")
    advantages = ragged.values(batch["advantages"])
    log_ratio = log_ratio_of(log_probs, batch)
    bounded = torch.where(
        advantages < 0,
        log_ratio.clamp(min=math.log1p(-clip_ratio_low)),
        log_ratio.clamp(max=math.log1p(clip_ratio_high)),
    )
    mean = row_mean(bounded.detach(), batch).clamp(max=10.0)
    terms = -advantages * mean.exp() * (bounded - bounded.detach()).exp()
    return terms, shared_metrics(log_ratio, bounded != log_ratio)
