"""The FSDP2 engine for value models: the backbone of a causal language model under a head with one output."""

import torch
from tidemill_dataproto import DataProto
from transformers import PretrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES

from tidemill_engines.base import BatchOutput
from tidemill_engines.fsdp2.language_model import FSDP2LanguageModel
from tidemill_engines.losses import LossFn, ValueOutput
from tidemill_engines.packing import ModelInputs


class FSDP2ValueModel(FSDP2LanguageModel):
    """Any causal language model with its head replaced by one linear output, the value of the state before each token.

    The head has the names that transformers gives it in models for token classification, `score.weight` and
    `score.bias`, as which the model is exported. Where the checkpoint has none, it starts at zero, as do all values.
    """

    new_weights = ("score.weight", "score.bias")

    def build_model(self) -> PreTrainedModel:
        model = super().build_model()
        self.unused_weights = tuple(_remove_head(model))
        hidden_size = model.config.get_text_config().hidden_size
        model.score = torch.nn.Linear(hidden_size, 1, device="meta", dtype=model.dtype)
        return model

    def forward_backward_batch(
        self,
        batch: DataProto,
        loss_fn: LossFn | None,
        *,
        forward_only: bool = False,
        calculate_entropy: bool = False,
    ) -> BatchOutput:
        if calculate_entropy:
            raise ValueError("a value model has no entropy; leave calculate_entropy out")
        return super().forward_backward_batch(batch, loss_fn, forward_only=forward_only)

    def prepare_model_outputs(
        self, hidden_states: torch.Tensor, inputs: ModelInputs, *, calculate_entropy: bool
    ) -> ValueOutput:
        head = self.model.score
        assert isinstance(head, torch.nn.Linear)
        dtype = torch.promote_types(hidden_states.dtype, torch.float32)
        values = torch.nn.functional.linear(hidden_states.to(dtype), head.weight.to(dtype), head.bias.to(dtype))
        return ValueOutput(values=values.squeeze(-1))

    def export_config(self) -> PretrainedConfig:
        config = super().export_config()
        config.num_labels = 1
        name = MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES.get(config.model_type)
        if name is not None:
            config.architectures = [name]
        return config


def _remove_head(model: PreTrainedModel) -> list[str]:
    """Removes the output embeddings; returns the names of their parameters."""
    head = model.get_output_embeddings()
    assert head is not None, f"{type(model).__name__} has no output embeddings"
    [path] = [path for path, module in model.named_modules() if module is head]
    names = [f"{path}.{name}" for name, _ in head.named_parameters()]
    owner, _, attribute = path.rpartition(".")
    delattr(model.get_submodule(owner), attribute)
    return names
