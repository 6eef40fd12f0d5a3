"""The head of value models: one output, by the names that transformers gives it in models for token classification."""

import torch
import torch.nn.functional as F
from transformers import PretrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES

NAMES = ("score.weight", "score.bias")


class ValueHead(torch.nn.Linear):
    """One output, in float32 at least."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """From hidden states [m, H] to values [m]."""
        dtype = torch.promote_types(input.dtype, torch.float32)
        return F.linear(input.to(dtype), self.weight.to(dtype), self.bias.to(dtype)).squeeze(-1)


def as_token_classifier(config: PretrainedConfig) -> PretrainedConfig:
    """Changes a language model's configuration into that of the model with one such output for each token."""
    config.num_labels = 1
    name = MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES.get(config.model_type)
    if name is not None:
        config.architectures = [name]
    return config
