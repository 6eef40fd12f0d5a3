"""The contract between an engine and a loss, and the loss of supervised fine-tuning."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Self

import torch
from tidemill_dataproto import DataProto

from tidemill_engines.metrics import Metric


@dataclass(frozen=True, kw_only=True, slots=True)
class Outputs:
    """What a model says about the N response tokens of a micro-batch, row after row: tensors [N, ...], or None.

    Attributes:
        router_loss: [N] float32 with gradient, of a mixture of experts that is trained with
            `ModelConfig.router_aux_loss_coef`: what adds up over a row to its load-balancing loss; else None.
        router_logits: [N, L, E] with gradient, of a mixture of experts with `ModelConfig.output_router_logits`: what
            the router of each of L layers said about E experts, for the token before each response token (whose
            hidden state predicts it); else None.
    """

    router_loss: torch.Tensor | None = None
    router_logits: torch.Tensor | None = None

    def columns(self) -> dict[str, torch.Tensor]:
        """The fields that are there, by name."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in values.items() if value is not None}

    def detached(self) -> Self:
        """The same without gradient."""
        return replace(self, **{name: value.detach() for name, value in self.columns().items()})


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelOutput(Outputs):
    """What the model says about the N response tokens of a micro-batch, row after row.

    Attributes:
        log_probs: [N] float32, log p(token | everything before it) at the batch's temperature, with gradient.
        entropy: [N] float32 of the predicting distributions, with gradient; None unless it was asked for.
    """

    log_probs: torch.Tensor
    entropy: torch.Tensor | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class ValueOutput(Outputs):
    """What a value model says about the N response tokens of a micro-batch, row after row.

    Attributes:
        values: [N] float32, the value of the state that each token is chosen in (everything before it), with gradient.
    """

    values: torch.Tensor


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


def sft_loss(
    model_output: ModelOutput, micro_batch: DataProto, normalizer: Normalizer
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The mean negative log-likelihood per trained token of the global batch: -sum(mask * log_probs) / num_tokens.

    A mask of fractions weighs the tokens; one that adds up to less than 1 in all gives less than the mean, as
    `Normalizer.num_tokens` is at least 1.

    Returns:
        The 0-d loss and no further metrics.

    Raises:
        TypeError: of a value model, which says nothing of probabilities.
    """
    if not isinstance(model_output, ModelOutput):
        raise TypeError(f"sft_loss takes the ModelOutput of a language model; got a {type(model_output).__name__}")
    mask = micro_batch["response_mask"].values().to(model_output.log_probs.dtype)
    return -(model_output.log_probs * mask).sum() / normalizer.num_tokens, {}
