"""The loss of supervised fine-tuning."""

import torch
from tidemill_dataproto import DataProto

from tidemill_engines.loss.contract import Normalizer
from tidemill_engines.model_io import ModelOutput


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
