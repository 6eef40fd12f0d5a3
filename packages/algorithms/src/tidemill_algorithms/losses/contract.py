"""The interface of a policy loss, and the ratio of the policies."""

from collections.abc import Callable
from typing import TypeAlias

import torch
from tidemill_dataproto import DataProto, ragged

__all__ = ["PolicyLoss", "log_ratio_of", "ratio_of", "require_not_negative", "row_mean", "shared_metrics"]

# (log_probs, batch, *, options) -> (terms, metrics): log_probs [N] with gradient, flat like the values of
# `response_mask`; batch: the columns of the micro-batch, and `topk_log_probs` [B, j, k] of the current policy with
# gradient if it has `topk_ids`; terms [N], to be minimised, finite also where the mask is 0; metrics [N], to be
# averaged over trained tokens.
PolicyLoss: TypeAlias = Callable[..., tuple[torch.Tensor, dict[str, torch.Tensor]]]


def log_ratio_of(log_probs: torch.Tensor, batch: DataProto) -> torch.Tensor:
    """Return log(pi / pi_old) of each token [N], with gradient; pi_old is the column `old_log_probs`."""
    return log_probs - ragged.values(batch["old_log_probs"])


def ratio_of(log_ratio: torch.Tensor) -> torch.Tensor:
    """Return the exponential of a log ratio clamped to +-20, so that one token cannot make the sum infinite."""
    return log_ratio.clamp(-20.0, 20.0).exp()


def shared_metrics(log_ratio: torch.Tensor, clipped: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return `actor/ppo_kl`, log(pi_old / pi), and `actor/pg_clipfrac`, 1 for a token whose gradient is cut."""
    return {"actor/ppo_kl": -log_ratio.detach(), "actor/pg_clipfrac": clipped}


def require_not_negative(**options: float) -> None:
    """Raise ValueError if an option is negative."""
    for name, value in options.items():
        if value < 0:
            raise ValueError(f"{name} must be >= 0, got {value}")


def row_mean(flat: torch.Tensor, batch: DataProto) -> torch.Tensor:
    """Return the mean over the trained tokens of each row, expanded to its tokens [N]; 0 without trained tokens."""
    column = batch["response_mask"]
    mask = ragged.values(column).to(flat.dtype)
    tokens = ragged.segment_sum(mask, column)
    mean = ragged.segment_sum(flat * mask, column) / torch.where(tokens > 0, tokens, 1.0)
    return ragged.expand_rows(mean, column)
