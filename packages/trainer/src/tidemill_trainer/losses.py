"""The policy loss over the flat response tokens of a micro-batch."""

from dataclasses import dataclass
from typing import Literal

import torch
from tidemill_dataproto import DataProto, ragged
from tidemill_engines import ModelOutput, Normalizer

AggMode = Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean"]


def token_weights(response_mask: torch.Tensor, normalizer: Normalizer, mode: AggMode) -> torch.Tensor:
    """Return the weight of each token. The loss is the sum of weight times term over all tokens of the global batch.

    Args:
        response_mask: ragged [B, j], 1 for tokens that are trained on.
        normalizer: number of tokens and sequences of the global batch.
        mode: "token-mean": 1 / tokens; "seq-mean-token-sum": 1 / sequences; "seq-mean-token-mean": 1 / sequences /
            tokens of the same sequence.

    Returns:
        float32 [N], flat like the values of the mask; 0 where the mask is 0.
    """
    mask = response_mask.values().float()
    if mode == "token-mean":
        return mask / normalizer.num_tokens
    if mode == "seq-mean-token-sum":
        return mask / normalizer.num_sequences
    if mode == "seq-mean-token-mean":
        row_tokens = ragged.segment_sum(mask, response_mask).clamp(min=1)
        return mask / ragged.expand_rows(row_tokens, response_mask) / normalizer.num_sequences
    raise ValueError(f"loss_agg_mode must be one of token-mean, seq-mean-token-sum, seq-mean-token-mean, got {mode!r}")


@dataclass(frozen=True, kw_only=True, slots=True)
class PPOLoss:
    """The clipped surrogate of PPO (Schulman et al. 2017, arXiv:1707.06347, eq. 7) with the dual clip of
    Ye et al. 2020 (arXiv:1912.09729, eq. 5), and an entropy bonus.

    Requires the ragged columns `old_log_probs`, `advantages` and `response_mask`. As `LossFn` requires, metrics are
    shares that add up over micro-batches: `actor/pg_loss` with the weights of the loss, and as means over tokens
    `actor/ppo_kl` (old - new log-prob), `actor/pg_clipfrac` (tokens with an active clip) and `actor/pg_clipfrac_lower`
    (tokens with an active dual clip). The arguments are those of `ActorConfig`.
    """

    clip_ratio_low: float = 0.2
    clip_ratio_high: float = 0.2
    clip_ratio_c: float = 3.0
    entropy_coeff: float = 0.0
    loss_agg_mode: AggMode = "token-mean"

    def __call__(
        self, model_output: ModelOutput, micro_batch: DataProto, normalizer: Normalizer
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        response_mask = micro_batch["response_mask"]
        advantages = micro_batch["advantages"].values()
        log_ratio = model_output.log_probs - micro_batch["old_log_probs"].values()
        ratio = log_ratio.clamp(-20.0, 20.0).exp()  # avoid an infinite sum because of one token
        plain = -advantages * ratio
        clipped = -advantages * ratio.clamp(1.0 - self.clip_ratio_low, 1.0 + self.clip_ratio_high)
        upper = torch.maximum(plain, clipped)
        bound = -advantages * self.clip_ratio_c
        terms = torch.where(advantages < 0, torch.minimum(upper, bound), upper)

        weights = token_weights(response_mask, normalizer, self.loss_agg_mode)
        per_token = token_weights(response_mask, normalizer, "token-mean")
        loss = pg_loss = (terms * weights).sum()
        metrics = {
            "actor/pg_loss": pg_loss.detach(),
            "actor/ppo_kl": -(log_ratio.detach() * per_token).sum(),
            "actor/pg_clipfrac": ((clipped > plain) * per_token).sum(),
            "actor/pg_clipfrac_lower": (((upper > bound) & (advantages < 0)) * per_token).sum(),
        }
        if self.entropy_coeff != 0.0:
            assert model_output.entropy is not None
            entropy = (model_output.entropy * weights).sum()
            metrics["actor/entropy_loss"] = entropy.detach()
            loss = pg_loss - self.entropy_coeff * entropy
        return loss, metrics
