"""The clipped importance weight of CISPO."""

import torch
from tidemill_dataproto import DataProto, ragged

from tidemill_algorithms.losses.contract import log_ratio_of, ratio_of, require_not_negative, shared_metrics

__all__ = ["cispo"]


def cispo(
    log_probs: torch.Tensor, batch: DataProto, *, clip_ratio_low: float = 1.0, clip_ratio_high: float = 4.0
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Compute -sg[clip(r, 1 - low, 1 + high)] A log pi: the weight is clipped, and every token keeps a gradient.

    CISPO (MiniMax-M1, arXiv:2506.13585, eq. 4 and 5); r = pi / pi_old of the token. As in the paper, there is no lower
    bound by default (`clip_ratio_low` of 1). The upper bound of 5 is that of ScaleRL (arXiv:2510.13786).

    Args:
        log_probs: [N], of the current policy.
        batch: ragged `old_log_probs` and `advantages`.
        clip_ratio_low: distance of the lower bound from 1.
        clip_ratio_high: distance of the upper bound from 1; TRL's `epsilon_high` is the bound itself.

    Returns:
        Terms [N]; metrics `actor/ppo_kl` and `actor/pg_clipfrac` (tokens with a clipped weight).

    >>> log_probs = torch.tensor([0.5, 1.5, 6.0, 1.0, 1.0, 1.0]).log()
    >>> cispo(log_probs, on_policy)[0]
    tensor([ 0.3466, -0.6082,  8.9588,  0.0000,  0.0000, -0.0000])
    """
    require_not_negative(clip_ratio_low=clip_ratio_low, clip_ratio_high=clip_ratio_high)
    log_ratio = log_ratio_of(log_probs, batch)
    ratio = ratio_of(log_ratio.detach())
    weight = ratio.clamp(1.0 - clip_ratio_low, 1.0 + clip_ratio_high)
    return -ragged.values(batch["advantages"]) * weight * log_probs, shared_metrics(log_ratio, weight != ratio)
