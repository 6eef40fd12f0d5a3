"""The FSDP2 engine for value models: the backbone of a causal language model with a head of one output."""

import torch
from transformers import PretrainedConfig, PreTrainedModel

from tidemill_engines.fsdp2.language_model import FSDP2LanguageModel
from tidemill_engines.head.value import NAMES, ValueHead, as_token_classifier
from tidemill_engines.model_io import ModelInputs, ValueOutput


class FSDP2ValueModel(FSDP2LanguageModel):
    """A causal language model whose head is replaced by one linear output, the value of the state before each token.

    The head's weights are `score.weight` and `score.bias`, the names of transformers' token classification models, and
    the model is exported as such a model. If the checkpoint has no such head, it starts at zero.
    """

    has_entropy = False
    new_weights = NAMES

    def build_model(self) -> PreTrainedModel:
        model = super().build_model()
        self.unused_weights = tuple(_remove_head(model))
        hidden_size = model.config.get_text_config().hidden_size
        model.score = ValueHead(hidden_size, 1, device="meta", dtype=model.dtype)
        return model

    def prepare_model_outputs(
        self, hidden_states: torch.Tensor, inputs: ModelInputs, *, calculate_entropy: bool
    ) -> ValueOutput:
        head = self.model.score
        assert isinstance(head, ValueHead)
        return ValueOutput(values=head(hidden_states))

    def export_config(self) -> PretrainedConfig:
        return as_token_classifier(super().export_config())


def _remove_head(model: PreTrainedModel) -> list[str]:
    """Remove the output embeddings and return the names of their parameters."""
    head = model.get_output_embeddings()
    assert head is not None, f"{type(model).__name__} has no output embeddings"
    [path] = [path for path, module in model.named_modules() if module is head]
    names = [f"{path}.{name}" for name, _ in head.named_parameters()]
    owner, _, attribute = path.rpartition(".")
    delattr(model.get_submodule(owner), attribute)
    return names
