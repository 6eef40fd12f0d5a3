"""The defaults for GPUs, which the configuration of a run on a CPU does not have."""

import json

import pytest
from tidemill_trainer.config import Config
from tidemill_trainer.config_file import ConfigError, load_config, read_config, save_config
from tidemill_trainer.gpu_defaults import gpu_defaults, in_one_line
from tidemill_trainer.gpus import num_episodes_per_engine
from tidemill_trainer.rollout.worker import engine_arguments
from tidemill_trainer.sft.config import SFTConfig


@pytest.fixture
def model(tmp_path):
    def write(**fields):
        (tmp_path / "model").mkdir(exist_ok=True)
        (tmp_path / "model" / "config.json").write_text(json.dumps({"model_type": "qwen3", **fields}))
        return f'[model]\npath = "{tmp_path / "model"}"\n'

    return write


def read(tmp_path, text, *overrides, has_gpu=True):
    (tmp_path / "run.toml").write_text(text)
    return read_config(Config, tmp_path / "run.toml", overrides, has_gpu=has_gpu)


def test_run_on_gpus_computes_in_bfloat16_with_compiled_layers(tmp_path, model):
    config = read(tmp_path, model())
    assert (config.engine.param_dtype, config.model.dtype, config.model.compile_layers) == ("bfloat16", "float32", True)
    assert (config.rollout.deterministic, config.rollout.mem_fraction_static) == (False, 0.8)
    assert config.episode.num_workers == 4
    save_config(config, tmp_path / "saved.toml")
    assert load_config(tmp_path / "saved.toml") == config  # also where there is no GPU
    sft = read_config(SFTConfig, tmp_path / "run.toml", has_gpu=True)
    assert (sft.engine.param_dtype, sft.model.compile_layers) == ("bfloat16", True)


def test_run_on_a_cpu_keeps_the_defaults_of_the_configuration(tmp_path, model):
    config = read(tmp_path, model(), has_gpu=False)
    assert (config.engine.param_dtype, config.model.compile_layers) == ("float32", False)
    assert config.rollout.deterministic
    assert config.episode.num_workers == 1
    mixed = read(tmp_path, model(), "engine.device=cpu", "rollout.device=cuda", has_gpu=False)
    assert (mixed.engine.param_dtype, mixed.rollout.deterministic) == ("float32", False)


def test_given_values_are_kept(tmp_path, model):
    given = ["engine.param_dtype=float32", "model.compile_layers=false", "rollout.deterministic=true"]
    config = read(tmp_path, model(), *given, "rollout.num_gpus_per_engine=0.5", "episode.num_workers=2")
    assert config.episode.num_workers == 2
    assert (config.engine.param_dtype, config.model.compile_layers) == ("float32", False)
    assert (config.rollout.deterministic, config.rollout.mem_fraction_static) == (True, 0.5)


@pytest.mark.parametrize(
    ("fields", "more"), [({"num_experts": 8}, ""), ({"vision_config": {}}, ""), ({}, "lora = { rank = 4 }\n")]
)
def test_only_layers_of_dense_language_models_are_compiled(tmp_path, model, fields, more):
    assert not read(tmp_path, model(**fields) + more).model.compile_layers
    assert read(tmp_path, model()).model.compile_layers


def test_megatron_has_no_compiled_layers(tmp_path, model):
    config = read(tmp_path, model(), "engine.backend=megatron")
    assert (config.engine.param_dtype, config.model.compile_layers) == ("bfloat16", False)


@pytest.mark.parametrize("override", ["rollout=5", "rollout.num_gpus_per_engine=abc"])
def test_wrong_values_are_refused_as_on_a_cpu(tmp_path, model, override):
    for has_gpu in (True, False):
        with pytest.raises(ConfigError, match=override.partition("=")[0]):
            read(tmp_path, model(), override, has_gpu=has_gpu)


def test_a_section_that_is_no_table_is_left_to_its_check():
    assert gpu_defaults({"engine": 3, "rollout": [], "model": 1}, has_gpu=True)["engine"] == {"param_dtype": "bfloat16"}


def test_graphs_of_an_engine_reach_its_batch(tmp_path, model):
    settings = ["rollout.device=cuda", "data.train_batch_size=50", "rollout.num_engines=3", "rollout.n=4"]
    config = read(tmp_path, model(), *settings)
    assert num_episodes_per_engine(config) == 67
    arguments = engine_arguments(config.rollout, config.model, num_episodes=67)
    assert arguments["cuda_graph_max_bs_decode"] == 67
    assert engine_arguments(config.rollout, config.model, num_episodes=4096)["cuda_graph_max_bs_decode"] == 512
    config = read(tmp_path, model(), *settings, "rollout.engine_args.cuda_graph_max_bs_decode=8")
    assert engine_arguments(config.rollout, config.model, num_episodes=67)["cuda_graph_max_bs_decode"] == 8


def test_first_line_says_what_decides_the_speed(tmp_path, model):
    line = in_one_line(read(tmp_path, model(), "placement.engines=turns", "rollout.deterministic=true"))
    assert line == (
        "engines in turns with the training workers; fsdp2 in bfloat16, compiled; micro-batches of 16384 tokens; "
        "KV pool and weights 80% of a GPU; deterministic inference"
    )
    line = in_one_line(read(tmp_path, model(), "placement.engines=turns", "placement.offload=false"))
    assert line.startswith("engines in turns with the training workers, whose state stays on the GPU; fsdp2")


def test_engines_sample_in_one_pass_unless_the_vocabulary_is_restricted(tmp_path, model):
    def backend(*settings):
        config = read(tmp_path, model(), "rollout.device=cuda", *settings)
        return engine_arguments(config.rollout, config.model).get("sampling_backend")

    assert backend() == "tidemill"
    assert backend("rollout.top_p=0.9") is backend("rollout.top_k=20") is backend("rollout.deterministic=true") is None
    assert backend('rollout.engine_args.sampling_backend="pytorch"') == "pytorch"
