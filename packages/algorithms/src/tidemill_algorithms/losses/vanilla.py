"""The clipped surrogate of PPO."""

import torch
from tidemill_dataproto import DataProto, ragged

from tidemill_algorithms.losses.contract import log_ratio_of, ratio_of, require_not_negative, shared_metrics

__all__ = ["vanilla"]


def vanilla(
    log_probs: torch.Tensor,
    batch: DataProto,
    *,
    clip_ratio_low: float = 0.2,
    clip_ratio_high: float = 0.2,
    clip_ratio_c: float = 3.0,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Compute max(-rA, -clip(r, 1 - low, 1 + high) A), and for A < 0 at most -cA.

    PPO (Schulman et al. 2017, arXiv:1707.06347, eq. 7), dual clip (Ye et al. 2020, arXiv:1912.09729, eq. 5) and the
    higher upper bound of DAPO (Yu et al. 2025, arXiv:2503.14476: 0.2 and 0.28). r = pi / pi_old of the token.

    Args:
        log_probs: [N], of the current policy.
        batch: ragged `old_log_probs` and `advantages`.
        clip_ratio_low: distance of the lower bound from 1.
        clip_ratio_high: distance of the upper bound from 1.
        clip_ratio_c: largest ratio of a token with a negative advantage, > 1.

    Returns:
        Terms [N]; metrics `actor/ppo_kl`, `actor/pg_clipfrac` and `actor/pg_clipfrac_lower` (active dual clip).

    >>> log_probs = torch.tensor([1.5, 0.5, 1.5, 0.5, 5.0, 1.0]).log()
    >>> terms, metrics = vanilla(log_probs, on_policy)
    >>> terms
    tensor([-1.2000, -0.5000,  1.5000,  0.8000,  3.0000, -1.0000])
    >>> metrics["actor/pg_clipfrac"]
    tensor([ True, False, False,  True, False, False])
    """
    require_not_negative(clip_ratio_low=clip_ratio_low, clip_ratio_high=clip_ratio_high)
    if clip_ratio_c <= 1:
        raise ValueError(f"clip_ratio_c must be > 1, got {clip_ratio_c}")
    advantages = ragged.values(batch["advantages"])
    log_ratio = log_ratio_of(log_probs, batch)
    ratio = ratio_of(log_ratio)
    # By the sign of A, without torch.where, which takes as long as four products on a CPU.
    gains = advantages.clamp(min=0.0) * ratio.clamp(max=1.0 + clip_ratio_high)
    losses = advantages.clamp(max=0.0) * ratio.clamp(1.0 - clip_ratio_low, clip_ratio_c)
    terms = -(gains + losses)
    plain, value = -(advantages * ratio.detach()), terms.detach()
    return terms, {**shared_metrics(log_ratio, value > plain), "actor/pg_clipfrac_lower": value < plain}
