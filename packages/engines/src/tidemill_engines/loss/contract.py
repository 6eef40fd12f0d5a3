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
    """Counts over the whole global batch (all micro-batches of all data-parallel ranks), known before any backward.

    A loss divides its sums by one of them; gradients are added up, so they do not depend on how the batch was split.
    Both are at least 1, so that a batch without a trained token gives a loss of zero.

    Attributes:
        num_tokens: the sum of `response_mask`, which may hold fractions; 1 where that is less, so that there the mean
            per token is not what a loss divided by it is.
        num_sequences: the rows in which `response_mask` is not zero everywhere.
    """

    num_tokens: float
    num_sequences: float


LossFn = Callable[[Any, DataProto, Normalizer], tuple[torch.Tensor, Mapping[str, torch.Tensor | Metric]]]
"""`(model_output, micro_batch, normalizer) -> (loss, metrics)`.

`model_output` is a `ModelOutput`, or the `ValueOutput` of a value model. `loss` is 0-d, this micro-batch's share of the
global loss: the shares of all micro-batches add up to it. `metrics` are the same names for every micro-batch: a 0-d
tensor is a share too and is added up over micro-batches and ranks; a `Metric` says how it is reduced (a mean brings its
own weights). Columns of `micro_batch` shaped like the responses have flat values that are aligned with the output's;
zero rows are an ordinary case.
"""

MicroBatchLoss = Callable[[Outputs, DataProto], tuple[torch.Tensor, Mapping[str, torch.Tensor | Metric]]]
"""A `LossFn` with its normalizer filled in."""


def checked_loss(result: Any) -> tuple[torch.Tensor, Mapping[str, torch.Tensor | Metric]]:
    """What a loss has returned, if it is what `LossFn` says.

    Raises:
        TypeError: it is something else, or a metric is no tensor.
        ValueError: the loss is not 0-d, or a metric has its name.
    """
    if not isinstance(result, tuple) or len(result) != 2 or not isinstance(result[1], Mapping):
        raise TypeError(f"a loss returns (loss, metrics): a 0-d tensor and a dict; got a {type(result).__name__}")
    loss, metrics = result
    for name, value in {"the loss": loss, **{f"metric {name}": value for name, value in metrics.items()}}.items():
        if not isinstance(value, torch.Tensor | Metric):
            raise TypeError(f"{name} must be a tensor, got a {type(value).__name__}; make it one with torch.tensor()")
    if "loss" in metrics:
        raise ValueError("the loss reports a metric 'loss', as the engine itself calls the loss; rename or drop it")
    if loss.dim():
        raise ValueError(f"the loss must be 0-d, got shape {tuple(loss.shape)}; sum it and divide by the normalizer")
    return loss, metrics
