"""What torch compiles."""

import pytest
import torch
from tidemill_engines.attention.packed import register_attention
from tidemill_engines.config import ModelConfig
from tidemill_engines.fsdp2.model import build_model, decoder_layers
from tidemill_engines.model_io import PackedLayout
from tidemill_testing import tiny_model


@pytest.mark.parametrize("gradient_checkpointing", [False, True])
def test_numbers_of_a_layer_are_constants_and_one_graph_takes_all_lengths(tmp_path, gradient_checkpointing):
    path = tiny_model(tmp_path / "model", "qwen3", vocab_size=32)
    register_attention()
    config = ModelConfig(path=str(path), compile_layers=True, gradient_checkpointing=gradient_checkpointing)
    model = build_model(config).to_empty(device="cpu")
    inputs = []

    def backend(graph, example_inputs):
        inputs.append(example_inputs)
        return graph.forward

    torch.compiler.reset()
    for layer in decoder_layers(model):
        layer.compile(dynamic=True, backend=backend)
    for lengths in ([5, 7], [3, 9, 20]):
        ids = torch.zeros(1, sum(lengths), dtype=torch.long)
        positions = torch.cat([torch.arange(length) for length in lengths])[None]
        layout = PackedLayout.from_lengths(torch.tensor(lengths), torch.device("cpu"))
        model(input_ids=ids, position_ids=positions, tidemill_layout=layout, use_cache=False)  # as the engine does
    assert len(inputs) == 1
    assert [each for each in inputs[0] if isinstance(each, torch.Tensor) and each.ndim == 0] == []
    assert not any(isinstance(each, float | torch.SymFloat) for each in inputs[0])
