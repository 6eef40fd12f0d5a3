"""The loss of a policy over a micro-batch, for training engines."""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from tidemill_dataproto import DataProto, ragged

from tidemill_algorithms.columns import values_per_token
from tidemill_algorithms.correction import rollout_correction
from tidemill_algorithms.finite import check_finite
from tidemill_algorithms.kl import KLPenalty, check_kl_penalty, kl_penalty
from tidemill_algorithms.losses import POLICY_LOSSES, PolicyLoss

__all__ = ["ActorLoss"]

_WITHOUT_RATIO = ("policy_gradient", "forward_kl_topk")


class _Outputs(Protocol):
    """Outputs of a language model, [N], flat like the values of `response_mask`."""

    @property
    def log_probs(self) -> torch.Tensor: ...

    @property
    def entropy(self) -> torch.Tensor | None: ...

    @property
    def topk_log_probs(self) -> torch.Tensor | None: ...


class _Counts(Protocol):
    """Counts over the global batch."""

    @property
    def num_tokens(self) -> float: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class ActorLoss:
    """A policy loss, an entropy bonus and a KL penalty: `(model_output, micro_batch, normalizer) -> (loss, metrics)`.

    The loss is the sum of the loss's terms times the column `loss_weights` of `aggregation.token_weights`, so the
    losses of all micro-batches add up to that of the global mini-batch. With a column `rollout_is_weights`, the terms
    are multiplied by it. Entropy and KL have the weights of the loss.

    Without a column `old_log_probs`, the policy that has sampled the tokens is the current one: the ratio is 1, with
    its gradient. In bypass mode, the column `rollout_log_probs` takes the place of `old_log_probs`, which need not be
    computed, and `rollout_correction` of the current policy's ratio applies to the terms. Rejected tokens have the
    weight 0 there and remain in the denominators.

    Metrics are shares that add up over micro-batches: `actor/pg_loss`, `actor/entropy_loss` and `actor/kl_loss` with
    the weights of the loss; `actor/kl_coef`; and those of the policy loss as means over trained tokens, in bypass mode
    with `rollout_corr/kl`, `rollout_corr/rollout_is_mean` and `rollout_corr/rollout_rs_masked_fraction`.

    Attributes:
        policy_loss: name in `POLICY_LOSSES`, or a function of the same signature.
        options: keyword arguments of the policy loss.
        entropy_coeff: coefficient of the mean entropy, which is subtracted from the loss.
        kl_loss_coef: coefficient of the mean KL penalty to the column `ref_log_prob`, which is added to the loss.
        kl_loss_type: estimate of the KL divergence, see `kl_penalty` for whose gradient it has.
        bypass_correction: options of `rollout_correction`, for bypass mode; empty: no correction beyond the ratio of
            the policy loss.

    Raises:
        ValueError: an unknown policy loss or KL penalty; an option that the policy loss does not have; a correction
            that is invalid, or weights (`rollout_is`) for a loss that has the same ratio already.
    """

    policy_loss: str | PolicyLoss = "vanilla"
    options: Mapping[str, Any] = field(default_factory=dict)
    entropy_coeff: float = 0.0
    kl_loss_coef: float = 0.0
    kl_loss_type: KLPenalty = "low_var_kl"
    bypass_correction: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        if isinstance(self.policy_loss, str) and self.policy_loss not in POLICY_LOSSES:
            raise ValueError(f"policy_loss must be one of {', '.join(POLICY_LOSSES)}, got {self.policy_loss!r}")
        check_kl_penalty(self.kl_loss_type)
        parameters = inspect.signature(self._function()).parameters.values()
        known = [one.name for one in parameters if one.kind is inspect.Parameter.KEYWORD_ONLY]
        unknown = sorted(self.options.keys() - set(known))
        if unknown:
            raise ValueError(
                f"policy loss {self._name()} has no option {', '.join(unknown)}; it has {', '.join(known) or 'none'}"
            )
        if self.bypass_correction is not None:
            nothing = ragged.ragged(torch.zeros(0), [])
            rollout_correction(nothing, nothing, **self.bypass_correction)
            has_ratio = isinstance(self.policy_loss, str) and self.policy_loss not in _WITHOUT_RATIO
            if has_ratio and self.bypass_correction.get("rollout_is") is not None:
                raise ValueError(
                    f"{self.policy_loss} has the ratio of the policies already, which `rollout_is` would apply twice; "
                    f"drop it, or choose {' or '.join(_WITHOUT_RATIO)}"
                )

    def _function(self) -> PolicyLoss:
        return POLICY_LOSSES[self.policy_loss] if isinstance(self.policy_loss, str) else self.policy_loss

    def _name(self) -> str:
        return str(getattr(self.policy_loss, "__name__", self.policy_loss))

    def _loss_terms(self, log_probs: torch.Tensor, batch: DataProto) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        for name in ("old_log_probs", "advantages"):
            if name in batch.batch.keys():  # noqa: SIM118
                values_per_token(batch, name, log_probs)
        result = self._function()(log_probs, batch, **self.options)
        if not isinstance(result, tuple):
            kind = type(result).__name__
            raise TypeError(
                f"policy loss {self._name()} must return (terms, metrics), got {kind}; metrics may be an empty dict"
            )
        terms, metrics = result
        named = {"the terms": terms} | {f"metric {name!r}": values for name, values in metrics.items()}
        for name, values in named.items():
            if values.shape != log_probs.shape:  # broadcasting would mix tokens
                raise ValueError(
                    f"policy loss {self._name()} must return a term for each token, and metrics of the same shape "
                    f"{tuple(log_probs.shape)}; the shape of {name} is {tuple(values.shape)}. The mean over tokens is "
                    f"taken afterwards (loss_agg_mode)"
                )
        return terms, metrics

    def _terms(self, log_probs: torch.Tensor, batch: DataProto) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Return the terms [N] of the policy loss after a correction, and metrics [N]."""
        has_weights = "rollout_is_weights" in batch.batch.keys()  # noqa: SIM118
        if self.bypass_correction is None:
            if "old_log_probs" not in batch.batch.keys():  # noqa: SIM118
                old = ragged.like(log_probs.detach(), batch["response_mask"])
                batch = batch.union(DataProto.from_dict({"old_log_probs": old}))
            terms, metrics = self._loss_terms(log_probs, batch)
            return (terms * values_per_token(batch, "rollout_is_weights", terms) if has_weights else terms), metrics
        if has_weights:
            raise ValueError("in bypass mode, expected no column rollout_is_weights; drop it, or bypass_correction")
        mask, rollout = batch["response_mask"], batch["rollout_log_probs"]
        columns = {name: batch[name] for name in batch.batch.keys()}  # noqa: SIM118
        batch = DataProto.from_dict(columns | {"old_log_probs": rollout}, batch.non_tensor_batch)
        terms, metrics = self._loss_terms(log_probs, batch)
        log_ratio = log_probs.detach() - values_per_token(batch, "rollout_log_probs", log_probs)
        weights, kept, _ = rollout_correction(ragged.like(log_ratio, mask), mask, **self.bypass_correction)
        metrics |= {
            "rollout_corr/kl": -log_ratio,
            "rollout_corr/rollout_is_mean": ragged.values(weights),
            "rollout_corr/rollout_rs_masked_fraction": ~ragged.values(kept),
        }
        return terms * ragged.values(weights) * ragged.values(kept), metrics

    def __call__(
        self, model_output: _Outputs, micro_batch: DataProto, normalizer: _Counts
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Return the 0-d share of the loss of a micro-batch and its metrics.

        Args:
            model_output: `log_probs` [N] with gradient; `entropy` [N] if there is an `entropy_coeff`, else it may be
                None; `topk_log_probs` [N, k] with gradient, which a policy loss reads as a column, or None.
            micro_batch: ragged `response_mask` and `loss_weights`, the columns of the policy loss, and `ref_log_prob`
                if there is a `kl_loss_coef`.
            normalizer: `num_tokens`, sum of the mask of the global mini-batch.

        Raises:
            ValueError: the loss is not finite, and the error names the first row and token; or the policy loss returned
                another shape than [N], or a column has one.
            TypeError: the policy loss did not return (terms, metrics).
        """
        weights = values_per_token(micro_batch, "loss_weights", model_output.log_probs)
        mask, num_tokens = ragged.values(micro_batch["response_mask"]).float(), normalizer.num_tokens
        if model_output.topk_log_probs is not None:
            topk = ragged.like(model_output.topk_log_probs, micro_batch["response_mask"])
            micro_batch = micro_batch.union(DataProto.from_dict({"topk_log_probs": topk}))
        terms, of_tokens = self._terms(model_output.log_probs, micro_batch)
        shares = {"policy loss": terms * weights}
        loss = shares["policy loss"].sum()
        metrics = {"actor/pg_loss": loss.detach()}
        metrics |= {name: (values.detach() * mask).sum() / num_tokens for name, values in of_tokens.items()}
        if self.entropy_coeff != 0.0:
            if model_output.entropy is None:
                raise ValueError(
                    "entropy_coeff requires the entropy of each token; compute it (calculate_entropy=True)"
                )
            shares["entropy"] = model_output.entropy * weights
            entropy = shares["entropy"].sum()
            metrics["actor/entropy_loss"] = entropy.detach()
            loss = loss - self.entropy_coeff * entropy
        if self.kl_loss_coef != 0.0:
            reference = values_per_token(micro_batch, "ref_log_prob", model_output.log_probs)
            penalty = kl_penalty(model_output.log_probs, reference, self.kl_loss_type)
            shares["KL penalty"] = penalty * weights
            kl = shares["KL penalty"].sum()
            metrics |= {"actor/kl_loss": kl.detach(), "actor/kl_coef": self.kl_loss_coef * mask.sum() / num_tokens}
            loss = loss + self.kl_loss_coef * kl
        check_finite(loss, shares, micro_batch, {"log_probs": model_output.log_probs})
        return loss, metrics
