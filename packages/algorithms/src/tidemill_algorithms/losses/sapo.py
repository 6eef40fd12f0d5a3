"""The soft gate of SAPO."""

import torch
from tidemill_dataproto import DataProto, ragged

from tidemill_algorithms.losses.contract import log_ratio_of, ratio_of

__all__ = ["sapo"]


def sapo(
    log_probs: torch.Tensor, batch: DataProto, *, tau_pos: float = 1.0, tau_neg: float = 1.05
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Compute -A (4 / tau) sigmoid(tau (r - 1)): the gradient of a token fades as its ratio leaves 1.

    SAPO (Gao et al. 2025, arXiv:2511.20347); r = pi / pi_old of the token. The paper's aggregation is
    `seq-mean-token-mean`.

    Args:
        log_probs: [N], of the current policy.
        batch: ragged `old_log_probs` and `advantages`.
        tau_pos: tau of tokens with A > 0, > 0; a larger one fades faster.
        tau_neg: tau of the others, > 0.

    Returns:
        Terms [N]; metric `actor/ppo_kl`.

    >>> log_probs = torch.tensor([1.0, 2.0, 1.0, 2.0, 0.5, 1.0]).log()
    >>> sapo(log_probs, on_policy)[0]
    tensor([-2.0000, -2.9242,  1.9048,  2.8220,  1.4159, -2.0000])
    """
    if min(tau_pos, tau_neg) <= 0:
        raise ValueError(f"tau_pos and tau_neg must be > 0, got {tau_pos} and {tau_neg}")
    advantages = ragged.values(batch["advantages"])
    log_ratio = log_ratio_of(log_probs, batch)
    tau = torch.where(advantages > 0, tau_pos, tau_neg).to(log_probs.dtype)
    gate = (4.0 / tau) * torch.sigmoid(tau * (ratio_of(log_ratio) - 1.0))
    return -advantages * gate, {"actor/ppo_kl": -log_ratio.detach()}
