"""The head of value models: one output, with the weight names of transformers' token classification models."""

import torch
import torch.nn.functional as F
from transformers import PretrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES

NAMES = ("score.weight", "score.bias")


class ValueHead(torch.nn.Linear):
    """Linear layer with one output, computed in float32 or wider."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Compute values [m] from hidden states [m, H]."""
        dtype = torch.promote_types(input.dtype, torch.float32)
        return F.linear(input.to(dtype), self.weight.to(dtype), self.bias.to(dtype)).squeeze(-1)


def as_token_classifier(config: PretrainedConfig) -> PretrainedConfig:
    """Change a language model's configuration to that of token classification with one label."""
    config.num_labels = 1
    name = MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES.get(config.model_type)
    if name is not None:
        config.architectures = [name]
    return config
