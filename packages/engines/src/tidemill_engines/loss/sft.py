"""The loss of supervised fine-tuning."""

import torch
from tidemill_dataproto import DataProto

from tidemill_engines.loss.contract import Normalizer
from tidemill_engines.model_io import ModelOutput


def sft_loss(
    model_output: ModelOutput, micro_batch: DataProto, normalizer: Normalizer
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Mean negative log-likelihood per trained token of the global batch: -sum(mask * log_probs) / num_tokens.

    A fractional mask weights the tokens; see `Normalizer.num_tokens` for a mask with a sum below 1.

    Returns:
        The 0-d loss and no further metrics.

    Raises:
        TypeError: the model is a value model, which has no probabilities.
    """
    if not isinstance(model_output, ModelOutput):
        raise TypeError(f"sft_loss requires the ModelOutput of a language model; got a {type(model_output).__name__}")
    mask = micro_batch["response_mask"].values().to(model_output.log_probs.dtype)
    return -(model_output.log_probs * mask).sum() / normalizer.num_tokens, {}
