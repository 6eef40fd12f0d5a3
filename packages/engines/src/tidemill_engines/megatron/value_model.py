"""The Megatron engine for value models: a causal language model with a head of one output, on the last stage."""

from dataclasses import replace

import torch
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from transformers import AutoModelForTokenClassification, PretrainedConfig

from tidemill_engines.head.value import NAMES, ValueHead, as_token_classifier
from tidemill_engines.megatron.architecture import Architecture
from tidemill_engines.megatron.batch.packed import MegatronInputs
from tidemill_engines.megatron.language_model import MegatronLanguageModel
from tidemill_engines.megatron.model.build import HiddenStatesModel
from tidemill_engines.megatron.weights.hf_weights import unwrapped
from tidemill_engines.model_io import Outputs, ValueOutput


class MegatronValueModel(MegatronLanguageModel):
    """A language model of the engine whose head is replaced by one linear output, the value before each token.

    The head's weights are `score.weight` and `score.bias`, the names of transformers' token classification models, and
    the model is exported as such a model. If the checkpoint has no such head, it starts at zero. Every tensor-parallel
    rank has the full head.
    """

    has_entropy = False
    new_weights = NAMES
    unused_weights = ("lm_head.weight",)
    counted_model = AutoModelForTokenClassification

    def read_architecture(self) -> Architecture:
        return replace(super().read_architecture(), tie_word_embeddings=False)

    def adapt(self, model: HiddenStatesModel) -> None:
        if model.post_process:
            del model.output_layer
            model.post_process = False  # else Megatron's checkpoints require the removed layer
            dtype = getattr(torch, self.engine_config.param_dtype)
            model.score = ValueHead(self.architecture.hidden_size, 1, dtype=dtype)

    def gather_hidden_states(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Gather as in language models; each rank's gradient is that of the full head already."""
        if self.engine_config.sequence_parallel:
            return gather_from_sequence_parallel_region(hidden_states, tensor_parallel_output_grad=False)
        return hidden_states

    def prepare_model_outputs(
        self, hidden_states: torch.Tensor, inputs: MegatronInputs, *, calculate_entropy: bool
    ) -> Outputs:
        head = unwrapped(self.chunks[-1]).score
        assert isinstance(head, ValueHead)
        return ValueOutput(values=self.of_all_tokens(head(hidden_states.index_select(0, inputs.predictors)), inputs))

    def export_config(self) -> PretrainedConfig:
        return as_token_classifier(super().export_config())
