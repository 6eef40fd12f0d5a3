"""init_seed: initialization by the model's rule, the same in any layout, without a weight file."""

import pytest
import torch
from engine_cases import VOCAB, build_engine, full, make_batch
from tidemill_engines import ModelConfig, sft_loss
from tidemill_engines.config import LoraConfig
from tidemill_testing import run_ranks, tiny_model

FAMILIES = ("qwen2", "qwen3", "qwen3_moe")


def without_weights(path, family):
    tiny_model(path, family, vocab_size=VOCAB)
    for file in path.glob("*.safetensors"):
        file.unlink()
    return path


def drawn(paths, seed):
    out = []
    for path in paths:
        engine = build_engine(path, model={"init_seed": seed})
        tensors = [*engine.model.named_parameters(), *engine.model.named_buffers()]
        out.append({name: full(tensor).detach().clone() for name, tensor in tensors})
        engine.close()
    return out


def test_init_seed_equals_transformers_in_any_layout(tmp_path):
    import transformers

    paths = [without_weights(tmp_path / family, family) for family in FAMILIES]
    alone = drawn(paths, 3)
    for other in run_ranks(drawn, 2, paths, 3):
        for one, two in zip(alone, other, strict=True):
            assert one.keys() == two.keys()
            assert all(torch.equal(one[name], two[name]) for name in one)
    other_seed = drawn(paths, 4)
    for path, weights, others in zip(paths, alone, other_seed, strict=True):
        config = transformers.AutoConfig.from_pretrained(path)
        reference = transformers.AutoModelForCausalLM.from_config(config)
        state = dict(reference.named_parameters()) | dict(reference.named_buffers())
        assert weights.keys() == state.keys()
        for name, expected in state.items():
            actual = weights[name]
            if expected.numel() > 500 and expected.std() > 0:  # same standard deviation
                assert actual.std() == pytest.approx(expected.std().item(), rel=0.1), name
                assert actual.mean().abs() < 0.02, name
                assert not torch.equal(actual, others[name]), name
            elif expected.std() == 0:
                assert torch.equal(actual, expected), name


def test_initialized_weights_are_exported_by_checkpoint_names(tmp_path):
    from safetensors import safe_open

    path = tiny_model(tmp_path / "model", "qwen3_moe", vocab_size=VOCAB)
    engine = build_engine(path, model={"init_seed": 0}, optimizer=False)
    shapes = {name: tuple(weight.shape) for name, weight in engine.get_per_tensor_param()}
    engine.close()
    with safe_open(path / "model.safetensors", "pt") as file:
        expected = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    assert shapes == expected


def test_training_from_scratch_and_value_head_at_zero(tmp_path):
    path, batch = without_weights(tmp_path / "model", "qwen3"), make_batch(8, seed=1)
    engine = build_engine(path, model={"init_seed": 0})
    losses = [engine.train_batch(batch, sft_loss)["loss"] for _ in range(5)]
    engine.close()
    assert losses[-1] < losses[0]
    critic = build_engine(path, model_type="value_model", model={"init_seed": 0}, optimizer=False)
    values = critic.infer_batch(batch)["values"]
    critic.close()
    assert not values.values().any()


def test_adapters_require_trained_weights():
    with pytest.raises(ValueError, match=r"leave ModelConfig\.init_seed at None"):
        ModelConfig(path="x", init_seed=0, lora=LoraConfig())
