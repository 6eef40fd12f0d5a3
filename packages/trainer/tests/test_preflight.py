import json
import os
import shutil
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from tidemill_trainer.bench.shapes import SHAPES
from tidemill_trainer.cli import BENCH_CONFIG, DEMO_CONFIG
from tidemill_trainer.config_file import ConfigError, load_config
from tidemill_trainer.doctor.machine import check_machine
from tidemill_trainer.preflight import check_model

_LATENT = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "hidden_size": 256,
    "intermediate_size": 512,
    "moe_intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "n_routed_experts": 4,
    "n_shared_experts": 2,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 128,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "vocab_size": 512,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
}


def _check(assets, progress, *overrides):
    config = load_config(DEMO_CONFIG, [*assets, *overrides])
    check_machine(config, progress)
    check_model(config)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model.path=nowhere", r"model\.path: expected .* model in /.*/nowhere, found no config\.json; .*hf download"),
        ("rollout.response_length=60", r"must be <= 64, the number of positions of the model, got 76"),
        ("rollout.tensor_parallel_size=3", r"rollout\.tensor_parallel_size=3 must divide the 4 attention heads"),
    ],
)
def test_config_that_does_not_match_the_model_is_rejected(assets, progress, override, message):
    with pytest.raises(ConfigError, match=message):
        _check(assets, progress, override)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["engine.ulysses_sequence_parallel_size=3", "actor.num_workers=3"], r"engine: .*ulysses_.* must divide the 4"),
        (
            ["engine.backend=megatron", "engine.pp=3", "actor.num_workers=3"],
            r"pp x vpp must divide the 4 layers, got 3",
        ),
        (["engine.backend=megatron", "model.frozen=['x']"], r"engine: .*does not support ModelConfig\.frozen"),
    ],
)
def test_engine_settings_that_do_not_match_the_model_are_rejected(assets, progress, overrides, message):
    with pytest.raises(ConfigError, match=message):
        _check(assets, progress, *overrides)


@pytest.mark.parametrize(
    ("model", "settings", "message"),
    [
        ({}, [], None),
        ({"head_dim": 64}, [], r"the size of attention heads is a multiple of 128, got 64; change .* engine.backend"),
        ({"head_dim": 64}, ["engine.backend=fsdp2"], None),
        ({"intermediate_size": 3200}, [], None),
        ({"intermediate_size": 3200}, ["engine.tp=2"], r"intermediate_size / 2 tensor-parallel ranks .*, got 1600"),
        ({"intermediate_size": 3200}, ["rollout.tensor_parallel_size=2"], r"rollout.tensor_parallel_size .*, got 1600"),
        ({"moe_intermediate_size": 768}, ["rollout.tensor_parallel_size=4"], r"moe_intermediate_size / .*, got 192"),
        ({"moe_intermediate_size": 768}, ["rollout.tensor_parallel_size=4", "rollout.engine_args.ep_size=4"], None),
        (_LATENT, [], None),
        (_LATENT, ["engine.tp=2", "engine.sequence_parallel=true"], r"queries of 1 heads .* of 128, got 192"),
        (
            _LATENT | {"num_attention_heads": 4, "n_shared_experts": 1},
            ["engine.tp=2", "engine.sequence_parallel=true", "engine.expert_tensor_parallel_size=1"],
            r"the intermediate size of shared experts / 2 ranks is a multiple of 128, got 64",
        ),
    ],
)
def test_parts_of_weights_that_cut_blocks_of_float8_are_rejected(tmp_path, model, settings, message):
    shape = model if "model_type" in model else SHAPES["qwen3-0.6b"] | model
    (tmp_path / "config.json").write_text(json.dumps(shape))
    overrides = ["engine.backend=megatron", "rollout.quantization=fp8", "rollout.device=cuda", "actor.num_workers=2"]
    config = load_config(BENCH_CONFIG, [*overrides, *settings, f"model.path={tmp_path}"])
    with nullcontext() if message is None else pytest.raises(ConfigError, match=message):
        check_model(config, reads_weights=False)


@pytest.mark.skipif(torch.cuda.is_available(), reason="of machines without a GPU")
@pytest.mark.parametrize("key", ["engine.device", "rollout.device"])
def test_cuda_is_rejected_without_a_gpu(assets, progress, key):
    with pytest.raises(ConfigError, match=rf'{key}="cuda" requires a GPU, but torch finds no CUDA device'):
        _check(assets, progress, f"{key}=cuda")


def test_more_workers_than_cpus_are_warned_about_or_rejected(assets, progress, terminal):
    cpus = len(os.sched_getaffinity(0))
    with pytest.raises(
        ConfigError, match=rf"num_workers must be <= {8 * cpus}, 8 for each of the {cpus} CPUs .* got {9 * cpus}"
    ):
        _check(assets, progress, f"actor.num_workers={9 * cpus}", "engine.device=cpu")
    assert terminal.getvalue() == ""
    _check(assets, progress, f"actor.num_workers={cpus + 1}", "engine.device=cpu")
    assert f"actor.num_workers={cpus + 1} is larger than the {cpus} CPUs" in terminal.getvalue()


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("config.json", "{", r"model\.path: expected JSON in .*config\.json: "),
        ("config.json", "[]", r"model\.path: expected a JSON object in .*config\.json, got \[\]"),
        ("model.safetensors", "cut off", r"model\.path: .*model\.safetensors is damaged"),
        ("model.safetensors", None, r"model\.path: expected model\.safetensors or "),
    ],
)
def test_damaged_model_is_rejected(assets, progress, tmp_path, file, text, message):
    model = Path(assets[0].removeprefix("model.path="))
    shutil.copytree(model, tmp_path / "model")
    (tmp_path / "model" / file).unlink()
    if text is not None:
        (tmp_path / "model" / file).write_text(text)
    with pytest.raises(ConfigError, match=message):
        _check(assets, progress, f"model.path={tmp_path / 'model'}")
