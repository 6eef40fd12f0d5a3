"""A policy loss in a file of its own: TOPR (Le Roux et al. 2025, arXiv:2503.14286).

tidemill train mine.toml algorithm.policy_loss=packages/algorithms/examples/my_loss.py:topr algorithm.max_ratio=0.5
"""

import torch
from tidemill_dataproto import DataProto, ragged


def topr(
    log_probs: torch.Tensor, batch: DataProto, *, max_ratio: float = 1.0
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Compute -A w log pi: w = 1 where A > 0, and w = sg[min(s, max_ratio)] elsewhere.

    s = pi / pi_old of the whole response, the product of the ratios of a row's trained tokens. Responses that are worse
    than the baseline lose their weight as they become unlikely; those that are better keep it. The paper's aggregation
    is `seq-mean-token-sum`.

    Args:
        log_probs: [N], of the current policy; a row must not be split.
        batch: ragged `response_mask`, `old_log_probs` and `advantages`.
        max_ratio: largest weight of a response with a negative advantage, > 0.

    Returns:
        Terms [N]; metric `actor/pg_clipfrac` (tokens whose weight is at the bound).
    """
    mask, advantages = batch["response_mask"], ragged.values(batch["advantages"])
    log_ratio = log_probs.detach() - ragged.values(batch["old_log_probs"])
    log_s = ragged.segment_sum(log_ratio * ragged.values(mask), mask)
    s = ragged.expand_rows(log_s, mask).clamp(max=20.0).exp()
    is_clipped = (advantages <= 0) & (s > max_ratio)
    weight = torch.where(advantages > 0, 1.0, s.clamp(max=max_ratio))
    return -advantages * weight * log_probs, {"actor/pg_clipfrac": is_clipped}
