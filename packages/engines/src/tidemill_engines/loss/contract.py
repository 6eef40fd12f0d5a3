"""The contract between an engine and a loss."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from tidemill_dataproto import DataProto

from tidemill_engines.loss.metrics import Metric
from tidemill_engines.model_io import Outputs


@dataclass(frozen=True, kw_only=True, slots=True)
class Normalizer:
    """Counts over the global batch (all micro-batches of all data-parallel ranks), known before the first backward.

    A loss divides its sums by one of them. Gradients are summed, so they do not depend on how the batch is split. Both
    counts are at least 1, so a batch without a trained token has a loss of zero.

    Attributes:
        num_tokens: sum of `response_mask`, which may contain fractions, but at least 1: for a smaller sum, a loss
            divided by it is not the mean per token.
        num_sequences: number of rows with a nonzero element of `response_mask`.
    """

    num_tokens: float
    num_sequences: float


LossFn = Callable[[Any, DataProto, Normalizer], tuple[torch.Tensor, Mapping[str, torch.Tensor | Metric]]]
"""`(model_output, micro_batch, normalizer) -> (loss, metrics)`.

`model_output` is a `ModelOutput`, or the `ValueOutput` of a value model. `loss` is 0-d, this micro-batch's share of the
global loss: the sum over all micro-batches is the global loss. `metrics` has the same names for every micro-batch: a
0-d tensor is summed over micro-batches and ranks; a `Metric` defines its own reduction. The flat values of response
columns of `micro_batch` are aligned with those of the output. A micro-batch may have zero rows.
"""

MicroBatchLoss = Callable[[Outputs, DataProto], tuple[torch.Tensor, Mapping[str, torch.Tensor | Metric]]]
"""A `LossFn` with a bound normalizer."""


def checked_loss(result: Any) -> tuple[torch.Tensor, Mapping[str, torch.Tensor | Metric]]:
    """Return the result of a loss after checking it against `LossFn`.

    Raises:
        TypeError: the result is not (loss, metrics), or a metric is not a tensor.
        ValueError: the loss is not 0-d, or a metric is named "loss".
    """
    if not isinstance(result, tuple) or len(result) != 2 or not isinstance(result[1], Mapping):
        raise TypeError(f"a loss must return (loss, metrics), a 0-d tensor and a dict; got a {type(result).__name__}")
    loss, metrics = result
    for name, value in {"the loss": loss, **{f"metric {name}": value for name, value in metrics.items()}}.items():
        if not isinstance(value, torch.Tensor | Metric):
            raise TypeError(f"{name} must be a tensor, got a {type(value).__name__}; convert it with torch.tensor()")
    if "loss" in metrics:
        raise ValueError("the loss reports a metric 'loss', a name that the engine reserves; rename or drop it")
    if loss.dim():
        raise ValueError(f"the loss must be 0-d, got shape {tuple(loss.shape)}; sum it and divide by the normalizer")
    return loss, metrics
