"""The trust region of DPPO in the total variation of a token."""

import torch
from tidemill_dataproto import DataProto, ragged

from tidemill_algorithms.losses.contract import log_ratio_of, ratio_of, require_not_negative, shared_metrics

__all__ = ["dppo_tv"]


def dppo_tv(
    log_probs: torch.Tensor,
    batch: DataProto,
    *,
    divergence_low: float = 0.2,
    divergence_high: float = 0.2,
    ratio_cap: float = 20.0,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Compute -rA, without the tokens whose probability has moved too far in the direction in which A pushes it.

    DPPO with the binary total variation (Qi et al. 2026, arXiv:2602.04879): a token is dropped if A > 0 and
    pi - pi_old > `divergence_high`, or A < 0 and pi_old - pi > `divergence_low`. A bound of the ratio r = pi / pi_old
    would drop tokens of small probability after a change that hardly matters, and keep likely ones after a large one.

    Args:
        log_probs: [N], of the current policy.
        batch: ragged `old_log_probs` and `advantages`.
        divergence_low: largest loss of probability; verl calls it `clip_ratio_low`.
        divergence_high: largest gain of probability; verl calls it `clip_ratio_high`.
        ratio_cap: largest r in value and gradient, > 1; verl calls it `clip_ratio_c`.

    Returns:
        Terms [N]; metrics `actor/ppo_kl` and `actor/pg_clipfrac` (dropped tokens).

    >>> old = ragged.like(torch.tensor([0.01, 0.5, 0.9, 0.5, 0.5, 0.5]).log(), mask)
    >>> sampled = DataProto.from_dict({"old_log_probs": old, "advantages": on_policy["advantages"]})
    >>> dppo_tv(torch.tensor([0.03, 0.8, 0.6, 0.6, 0.5, 0.5]).log(), sampled)[0]
    tensor([-3.0000, -0.0000,  0.0000,  1.2000,  1.0000, -1.0000])
    """
    require_not_negative(divergence_low=divergence_low, divergence_high=divergence_high)
    if ratio_cap <= 1:
        raise ValueError(f"ratio_cap must be > 1, got {ratio_cap}")
    advantages = ragged.values(batch["advantages"])
    log_ratio = log_ratio_of(log_probs, batch)
    gain = (log_probs.exp() - ragged.values(batch["old_log_probs"]).exp()).detach()
    dropped = ((advantages > 0) & (gain > divergence_high)) | ((advantages < 0) & (gain < -divergence_low))
    ratio = ratio_of(log_ratio.detach()).clamp(max=ratio_cap) * (log_probs - log_probs.detach()).exp()
    return -advantages * ratio * ~dropped, shared_metrics(log_ratio, dropped)
