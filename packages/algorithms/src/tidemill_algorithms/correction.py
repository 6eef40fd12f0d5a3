"""Correction of the difference between the policy that sampled the tokens and the one that trains on them."""

import math
from typing import Literal, get_args

import torch
from tidemill_dataproto import ragged

__all__ = ["RejectionRule", "rollout_correction"]

RejectionRule = Literal[
    "token_k1",
    "token_k2",
    "token_k3",
    "seq_sum_k1",
    "seq_sum_k2",
    "seq_sum_k3",
    "seq_mean_k1",
    "seq_mean_k2",
    "seq_mean_k3",
    "seq_max_k2",
    "seq_max_k3",
]


def rollout_correction(
    log_ratio: torch.Tensor,
    response_mask: torch.Tensor,
    *,
    rollout_is: Literal["token", "sequence"] | None = None,
    rollout_is_threshold: float | None = None,
    rollout_is_threshold_lower: float | None = None,
    rollout_rs: RejectionRule | None = None,
    rollout_rs_threshold: float | None = None,
    rollout_rs_threshold_lower: float | None = None,
    rollout_token_veto_threshold: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Compute importance weights and the tokens to keep from w = pi_old / pi_rollout (or pi / pi_rollout in bypass).

    The names are verl's, whose bounds of the k1 rules are of 1 / w. A sequence is a row; its ratio is the product over
    trained tokens.

    | method | options |
    |---|---|
    | TIS (truncated, https://fengyao.notion.site/off-policy-rl) | `rollout_is`, `rollout_is_threshold` |
    | MIS, IcePop (weight 0 outside of bounds) | also `rollout_is_threshold_lower` |
    | rejection of tokens or sequences | `rollout_rs`, `rollout_rs_threshold`, `rollout_rs_threshold_lower` |
    | geometric rejection | `rollout_rs="seq_mean_k1"`, for example with 0.999 and 1.001 |
    | veto of a sequence with one impossible token | `rollout_token_veto_threshold` |

    Args:
        log_ratio: ragged [B, j], log w of each token, without gradient; clamped to +-20, as is its sum over a row.
        response_mask: ragged [B, j], 1 for trained tokens.
        rollout_is: weights of tokens, or of sequences for all their tokens; None: all weights are 1.
        rollout_is_threshold: upper bound of the weights, 2 if None.
        rollout_is_threshold_lower: if given, weights outside of both bounds are 0 instead of truncated.
        rollout_rs: which measure of which unit is bounded; k1: the ratio itself; k2: (log w)^2 / 2; k3: w - 1 - log w;
            `seq_sum`, `seq_mean`, `seq_max`: over the trained tokens, for k1 of log w.
        rollout_rs_threshold: upper bound of the measure.
        rollout_rs_threshold_lower: lower bound of a ratio (k1), 1 / `rollout_rs_threshold` if None.
        rollout_token_veto_threshold: reject a sequence if any w is below this, such as 1e-4.

    Returns:
        `weights`, ragged float32 [B, j], 0 where the mask is 0; `kept`, ragged bool [B, j], for `token_weights`;
        metrics, 0-d: `rollout_corr/` with `kl` and `k3_kl` of pi_rollout from pi_old; `rollout_is_mean`, `_max` and
        `_min`; `rollout_is_eff_sample_size`, (sum w)^2 / (n sum w^2) of the weights of kept tokens over the n trained
        ones; `rollout_rs_masked_fraction` of tokens and `rollout_rs_seq_masked_fraction` of rows.

    Raises:
        ValueError: an unknown name, a threshold that is missing or has no effect, or a log ratio of a trained token
            that is not finite, such as that of a missing log-probability.

    >>> log_ratio = ragged.like(torch.tensor([1.0, 4.0, 1.1, 0.9, 1.0, 0.25]).log(), mask)
    >>> weights, kept, metrics = rollout_correction(
    ...     log_ratio, mask, rollout_is="token", rollout_is_threshold=2.0, rollout_rs="seq_mean_k1",
    ...     rollout_rs_threshold=3.0)
    >>> ragged.values(weights)
    tensor([1.0000, 2.0000, 1.1000, 0.9000, 1.0000, 0.2500])
    >>> ragged.values(kept)  # geometric means of 2, 1 and 0.25
    tensor([ True,  True,  True,  True,  True, False])
    """
    _check(rollout_is, rollout_is_threshold, rollout_is_threshold_lower)
    _check_rejection(rollout_rs, rollout_rs_threshold, rollout_rs_threshold_lower, rollout_token_veto_threshold)
    trained = ragged.values(response_mask) != 0
    flat = ragged.values(log_ratio).detach()
    if not torch.isfinite(flat[trained]).all():
        raise ValueError("expected finite log ratios of trained tokens; look for missing or infinite log-probabilities")
    exact = torch.where(trained, flat, 0.0)
    flat = exact.clamp(-20.0, 20.0)
    weights = torch.ones_like(flat)
    if rollout_is is not None:
        upper = 2.0 if rollout_is_threshold is None else rollout_is_threshold
        weights = (flat if rollout_is == "token" else _row_sum(flat, response_mask).clamp(-20.0, 20.0)).exp()
        if rollout_is_threshold_lower is None:
            weights = weights.clamp(max=upper)
        else:
            weights = torch.where((weights < rollout_is_threshold_lower) | (weights > upper), 0.0, weights)
    weights = torch.where(trained, weights, 0.0).float()
    kept = torch.ones_like(trained)
    if rollout_rs is not None:
        assert rollout_rs_threshold is not None
        kept = _within(flat, response_mask, trained, rollout_rs, rollout_rs_threshold, rollout_rs_threshold_lower)
    if rollout_token_veto_threshold is not None:
        vetoes = (exact < math.log(rollout_token_veto_threshold)).to(flat.dtype)
        kept = kept & (_row_sum(vetoes, response_mask) == 0)
    metrics = _metrics(flat, response_mask, trained, weights, kept)
    return ragged.like(weights, response_mask), ragged.like(kept, response_mask), metrics


def _within(
    log_ratio: torch.Tensor, column: torch.Tensor, trained: torch.Tensor, rule: str, upper: float, lower: float | None
) -> torch.Tensor:
    unit, measure = rule.rsplit("_", 1)
    values = {
        "k1": log_ratio,
        "k2": 0.5 * log_ratio.square(),
        "k3": log_ratio.exp() - 1 - log_ratio,
    }[measure]
    if unit == "seq_max":  # k2 and k3 are not negative, and 0 for tokens that are not trained
        rows = ragged.expand_rows(torch.arange(len(column), device=values.device), column)
        values = values.new_zeros(len(column)).scatter_reduce(0, rows, values, "amax")[rows]
    elif unit != "token":
        values = _row_sum(values, column)
        if unit == "seq_mean":
            values = values / _row_sum(trained.to(values.dtype), column).clamp(min=1)
    if measure != "k1":
        return values <= upper
    return (values >= (-math.log(upper) if lower is None else math.log(lower))) & (values <= math.log(upper))


def _row_sum(flat: torch.Tensor, column: torch.Tensor) -> torch.Tensor:
    """Return the sum over each row in float64, expanded to its tokens [N]."""
    return ragged.expand_rows(ragged.segment_sum(flat.double(), column), column)


def _metrics(
    log_ratio: torch.Tensor, column: torch.Tensor, trained: torch.Tensor, weights: torch.Tensor, kept: torch.Tensor
) -> dict[str, torch.Tensor]:
    count = trained.sum().clamp(min=1)

    def mean(values: torch.Tensor) -> torch.Tensor:
        return torch.where(trained, values, 0).double().sum() / count

    used = torch.where(kept, weights, 0.0).double()
    tokens, tokens_kept = (ragged.segment_sum(one, column) for one in (trained, trained & kept))
    rows = (tokens > 0).sum()
    seen = torch.where(trained, weights, torch.inf)
    smallest = torch.cat([seen, seen.new_full((1,), torch.inf)]).min()  # min() of an empty tensor is an error
    metrics = {
        "kl": mean(-log_ratio),
        "k3_kl": mean(log_ratio.exp() - 1 - log_ratio),
        "rollout_is_mean": mean(weights),
        "rollout_is_max": torch.cat([weights, weights.new_zeros(1)]).max(),
        "rollout_is_min": torch.where(torch.isinf(smallest), 0.0, smallest),
        "rollout_is_eff_sample_size": used.sum().square() / (used.square().sum() * count).clamp(min=1e-30),
        "rollout_rs_masked_fraction": mean(~kept),
        "rollout_rs_seq_masked_fraction": ((tokens > 0) & (tokens_kept == 0)).sum() / rows.clamp(min=1),
    }
    return {f"rollout_corr/{name}": value for name, value in metrics.items()}


def _check(rollout_is: str | None, upper: float | None, lower: float | None) -> None:
    if rollout_is not in (None, "token", "sequence"):
        raise ValueError(f"rollout_is must be token, sequence or None, got {rollout_is!r}")
    if rollout_is is None:
        _refuse(rollout_is_threshold=upper, rollout_is_threshold_lower=lower)
    _check_bounds("rollout_is_threshold", 2.0 if upper is None else upper, lower)


def _check_rejection(rule: str | None, upper: float | None, lower: float | None, veto: float | None) -> None:
    if rule is None:
        _refuse(rollout_rs_threshold=upper, rollout_rs_threshold_lower=lower)
    elif rule not in get_args(RejectionRule):
        raise ValueError(f"rollout_rs must be one of {', '.join(get_args(RejectionRule))} or None, got {rule!r}")
    elif upper is None:
        raise ValueError(f"rollout_rs={rule} requires rollout_rs_threshold, the upper bound")
    elif rule.endswith("k1"):
        _check_bounds("rollout_rs_threshold", upper, 1 / upper if lower is None and upper > 0 else lower)
    else:
        _check_bounds("rollout_rs_threshold", upper, None)
        if lower is not None:
            raise ValueError(f"rollout_rs_threshold_lower={lower} has no effect with {rule}; drop it")
    if veto is not None and not 0 < veto < 1:
        raise ValueError(f"rollout_token_veto_threshold must be between 0 and 1, got {veto}")


def _check_bounds(name: str, upper: float, lower: float | None) -> None:
    if not upper > 0:  # NaN, too
        raise ValueError(f"{name} must be > 0, got {upper}")
    if lower is not None and not 0 < lower < upper:
        raise ValueError(f"{name}_lower must be between 0 and {name}, got {lower} and {upper}")


def _refuse(**thresholds: float | None) -> None:
    for name, value in thresholds.items():
        if value is not None:
            raise ValueError(f"{name}={value} has no effect without {name.split('_threshold')[0]}; drop it")
