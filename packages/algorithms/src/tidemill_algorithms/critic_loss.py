"""The loss of a critic over a micro-batch, for training engines."""

from dataclasses import dataclass
from typing import Protocol

import torch
from tidemill_dataproto import DataProto, ragged

from tidemill_algorithms.columns import values_per_token
from tidemill_algorithms.finite import check_finite
from tidemill_algorithms.losses import value_loss

__all__ = ["CriticLoss"]


class _Outputs(Protocol):
    @property
    def values(self) -> torch.Tensor: ...


class _Counts(Protocol):
    @property
    def num_tokens(self) -> float: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class CriticLoss:
    """The clipped value loss: `(model_output, micro_batch, normalizer) -> (loss, metrics)`, as `ActorLoss`.

    Metrics: `critic/vf_loss` with the weights of the loss; `critic/vf_clipfrac` and `critic/vpred_mean` as means over
    trained tokens.

    Attributes:
        cliprange_value: see `value_loss`.
    """

    cliprange_value: float = 0.5

    def __call__(
        self, model_output: _Outputs, micro_batch: DataProto, normalizer: _Counts
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Return the 0-d share of the loss of a micro-batch and its metrics.

        Args:
            model_output: `values` [N] with gradient.
            micro_batch: ragged `response_mask`, `loss_weights`, `values` and `returns`.
            normalizer: `num_tokens`, sum of the mask of the global mini-batch.

        Raises:
            ValueError: the loss is not finite, and the error names the first row and token; or a column has another
                shape than [N].
        """
        per_token = ragged.values(micro_batch["response_mask"]).float() / normalizer.num_tokens
        weights = values_per_token(micro_batch, "loss_weights", model_output.values)
        for name in ("values", "returns"):
            values_per_token(micro_batch, name, model_output.values)
        terms, of_tokens = value_loss(model_output.values, micro_batch, cliprange_value=self.cliprange_value)
        shares = terms * weights
        loss = shares.sum()
        check_finite(loss, {"value loss": shares}, micro_batch, {"predicted values": model_output.values})
        metrics = {name: (values.detach() * per_token).sum() for name, values in of_tokens.items()}
        return loss, {"critic/vf_loss": loss.detach(), **metrics}
