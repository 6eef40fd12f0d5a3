"""The sequence-level ratio of GSPO."""

import torch
from tidemill_dataproto import DataProto, ragged

from tidemill_algorithms.losses.contract import log_ratio_of, require_not_negative, row_mean, shared_metrics

__all__ = ["gspo"]


def gspo(
    log_probs: torch.Tensor, batch: DataProto, *, clip_ratio_low: float = 3e-4, clip_ratio_high: float = 4e-4
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Compute max(-sA, -clip(s, 1 - low, 1 + high) A), with s the geometric mean of the ratios of a row's tokens.

    GSPO (Zheng et al. 2025, arXiv:2507.18071, eq. 5 and 7, and GSPO-token, eq. 13): s = exp(mean log(pi / pi_old)) over
    trained tokens. The term of token t is computed with sg[s] pi_t / sg[pi_t], so each token has its own advantage and
    weight; with equal ones in a row, the gradient is that of s. log s is at most 10.

    The paper's aggregation is `seq-mean-token-mean`.

    Args:
        log_probs: [N], of the current policy; a row must not be split.
        batch: ragged `response_mask`, `old_log_probs` and `advantages`.
        clip_ratio_low: distance of the lower bound of s from 1.
        clip_ratio_high: distance of the upper bound of s from 1.

    Returns:
        Terms [N]; metrics `actor/ppo_kl` and `actor/pg_clipfrac`.

    >>> log_probs = torch.tensor([1.1, 1.3, 1.1, 1.1, 1.1, 1.0]).log()
    >>> gspo(log_probs, on_policy, clip_ratio_low=0.2, clip_ratio_high=0.2)[0]  # s = 1.196, 1.1, 1
    tensor([-1.1958, -1.1958,  1.1000,  1.1000,  1.1000, -1.0000])
    """
    require_not_negative(clip_ratio_low=clip_ratio_low, clip_ratio_high=clip_ratio_high)
    advantages = ragged.values(batch["advantages"])
    log_ratio = log_ratio_of(log_probs, batch)
    log_s = row_mean(log_ratio.detach(), batch) + (log_probs - log_probs.detach())
    s = log_s.clamp(max=10.0).exp()
    plain = -advantages * s
    clipped = -advantages * s.clamp(1.0 - clip_ratio_low, 1.0 + clip_ratio_high)
    return torch.maximum(plain, clipped), shared_metrics(log_ratio, clipped > plain)
