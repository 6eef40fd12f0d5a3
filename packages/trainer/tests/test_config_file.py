import re
import shlex

import pytest
from tidemill_engines.megatron.config import MegatronConfig
from tidemill_trainer.cli import DEMO_CONFIG
from tidemill_trainer.config import Config
from tidemill_trainer.config_file import ConfigError, load_config, parse_config, save_config


def test_overrides_replace_values_of_the_file_and_keep_types(config_file):
    config = load_config(
        config_file, ["optimizer.lr=1", "data.train_files=['a', 'b']", "trainer.name=it's", "rollout.n=4"]
    )
    assert config.optimizer.lr == 1.0
    assert config.data.train_files == ("a", "b")
    assert config.trainer.name == "it's"
    assert config.rollout.n == 4
    assert load_config(config_file, ["trainer.name=2026-01-05"]).trainer.name == "2026-01-05"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "rollout.engine_args.disable_radix_cache=False",
            "write false, or write 'rollout.engine_args.disable_radix_cache=",
        ),
        ("algorithm.bypass_mode=True", "got True; write true, or write 'algorithm.bypass_mode=\"True\"' for the text"),
        (
            "trainer.checkpoint_dir=none",
            "got none; leave the key out for its default, or write 'trainer.checkpoint_dir=",
        ),
        ("rollout.engine_args.quantization=None", "got None; leave the key out"),
        ("model.lora= null", "got null; leave the key out"),
    ],
)
def test_words_of_python_and_json_are_refused_on_the_command_line(config_file, override, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        load_config(config_file, [override])


def test_word_none_is_accepted_in_quotes_and_as_the_name_of_an_estimator(config_file):
    quoted = ["trainer.checkpoint_dir='none'", 'rollout.engine_args.moe_a2a_backend="none"']
    config = load_config(config_file, [*quoted, "algorithm.adv_estimator=none"])
    assert (config.trainer.checkpoint_dir, config.algorithm.adv_estimator) == ("none", "none")
    assert config.rollout.engine_args == {"moe_a2a_backend": "none"}


def test_later_files_and_arguments_replace_earlier_keys(config_file, tmp_path):
    preset = tmp_path / "preset.toml"
    preset.write_text("[rollout]\nn = 4\n[algorithm]\nclip_ratio_high = 0.3\n")
    config = load_config(config_file, ["rollout.n=2", "rollout.response_length=9", str(preset), "trainer.seed=1"])
    assert (config.rollout.n, config.rollout.response_length, config.trainer.seed) == (4, 9, 1)
    assert config.algorithm.options == {"clip_ratio_high": 0.3}
    with pytest.raises(ConfigError, match=r"config file .*none\.toml does not exist"):
        load_config(config_file, ["none.toml"])


def test_saved_config_loads_as_equal_config(tmp_path):
    config = load_config(DEMO_CONFIG, ["optimizer.clip_grad=inf", "rollout.engine_args.log_level=error"])
    save_config(config, tmp_path / "resolved.toml")
    assert load_config(tmp_path / "resolved.toml") == config


def test_saved_config_has_param_groups_without_weight_decay(config_file, tmp_path):
    config = load_config(config_file, ['optimizer.param_groups=[{pattern="*embed*",lr_ratio=0.1}]'])
    save_config(config, tmp_path / "resolved.toml")
    loaded = load_config(tmp_path / "resolved.toml")
    assert loaded == config
    assert loaded.optimizer.param_groups[0].weight_decay is None


def test_missing_key_missing_file_and_invalid_toml_are_rejected(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=f"config file {tmp_path / 'none.toml'} does not exist"):
        load_config("none.toml")
    with pytest.raises(ConfigError, match=f"expected a config file, got the folder {tmp_path}; that of a run has the"):
        load_config(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"config file .*file/a\.toml cannot be read: Not a directory"):
        load_config("file/a.toml")
    with pytest.raises(ConfigError, match="does not exist; the first argument must be a TOML file"):
        load_config("optimizer.lr=1e-6")
    data = tmp_path / "train.jsonl"
    data.write_text('{"prompt": "1 + 1"}')
    with pytest.raises(ConfigError, match=r"train\.jsonl is not valid TOML .*pass data\.train_files='\[\""):
        load_config(data)
    bad = tmp_path / "bad.toml"
    bad.write_text("[model\n")
    with pytest.raises(ConfigError, match=r"bad\.toml is not valid TOML in UTF-8: Expected"):
        load_config(bad)
    bad.write_bytes('[model]\npath = "modèle"\n'.encode("latin-1"))
    with pytest.raises(ConfigError, match=r"bad\.toml is not valid TOML in UTF-8: 'utf-8' codec can't decode byte"):
        load_config(bad)
    bad.write_text("")
    with pytest.raises(ConfigError, match="config key model is required"):
        load_config(bad)
    bad.write_text("[model]\n")
    with pytest.raises(ConfigError, match=r"config key model\.path is required"):
        load_config(bad)


def test_tilde_in_paths_is_expanded(config_file, monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    paths = ["model.path=~/m", "data.train_files=['~/t.jsonl']", "reward.function=~/r.py:f", "trainer.run_dir=~/runs"]
    config = load_config(config_file, paths)
    assert (config.model.path, config.data.train_files) == ("/home/me/m", ("/home/me/t.jsonl",))
    assert (config.reward.function, config.trainer.run_dir) == ("/home/me/r.py:f", "/home/me/runs")


def test_backend_selects_the_engine_config(tmp_path):
    model = {"path": "m"}
    megatron = {"backend": "megatron", "tensor_model_parallel_size": 2}
    config = parse_config(Config, {"model": model, "actor": {"num_workers": 2}, "engine": megatron})
    assert config.engine == MegatronConfig(tensor_model_parallel_size=2)
    save_config(config, tmp_path / "config.toml")
    assert load_config(tmp_path / "config.toml") == config
    assert parse_config(Config, {"model": model, "engine": {"backend": "fsdp2"}}) == parse_config(
        Config, {"model": model}
    )


def test_short_names_of_parallel_sizes_work_on_the_command_line():
    sizes = {
        "tensor_model_parallel_size": 2,
        "pipeline_model_parallel_size": 4,
        "virtual_pipeline_model_parallel_size": 3,
        "context_parallel_size": 5,
        "expert_model_parallel_size": 6,
        "expert_tensor_parallel_size": 1,
    }
    short = [
        f"engine.{name}={size}"
        for name, size in zip(("tp", "pp", "vpp", "cp", "ep", "etp"), (2, 4, 3, 5, 6, 1), strict=True)
    ]
    config = load_config(DEMO_CONFIG, ["engine.backend=megatron", "actor.num_workers=40", *short])
    assert isinstance(config.engine, MegatronConfig)
    assert {name: getattr(config.engine, name) for name in sizes} == sizes
    recipe = load_config(DEMO_CONFIG.parent / "demo_megatron.toml")
    assert load_config(DEMO_CONFIG, ["engine.backend=megatron", "engine.tp=2"]) == recipe
    with pytest.raises(ConfigError, match=r'engine\.tensor_model_parallel_size requires engine\.backend="megatron"'):
        load_config(DEMO_CONFIG, ["engine.tp=2"])


def test_text_instead_of_an_array_is_rejected_with_the_array():
    message = r'data\.train_files must be a valid array, got .a\.jsonl.; write \["a\.jsonl"\]$'
    with pytest.raises(ConfigError, match=message):
        parse_config(Config, {"model": {"path": "m"}, "data": {"train_files": "a.jsonl"}})


@pytest.mark.parametrize(
    ("override", "proposed"),
    [
        ("data.train_files=[train.jsonl]", "'data.train_files=[\"train.jsonl\"]'"),
        ("data.train_files=['a.jsonl', b.jsonl]", '\'data.train_files=["a.jsonl", "b.jsonl"]\''),
        ("trainer.logger=[tensorboard]", "'trainer.logger=[\"tensorboard\"]'"),
        ("optimizer.betas=0.9,0.99", "'optimizer.betas=[0.9, 0.99]'"),
    ],
)
def test_array_whose_quotes_the_shell_removed_is_rejected_with_the_argument_to_write(config_file, override, proposed):
    with pytest.raises(ConfigError, match=f"must be a valid array, got .*; write {re.escape(proposed)} on the command"):
        load_config(config_file, [override])
    load_config(config_file, shlex.split(proposed))


@pytest.mark.parametrize(
    ("engine", "message"),
    [
        ({"backend": "fsdp3"}, r"engine\.backend must be one of fsdp2, megatron, got 'fsdp3'"),
        (
            {"backend": "megatron", "tensor_parallel_size": 2},
            r"unknown config key engine\.tensor_parallel_size; did you mean engine\.\w*tensor\w*\?",
        ),
        ({"tensor_model_parallel_size": 2}, r'tensor_model_parallel_size requires engine\.backend="megatron"'),
        ({"backend": "megatron", "fsdp_size": 2}, r'engine\.fsdp_size requires engine\.backend="fsdp2"'),
        ({"backend": "megatron", "seed": "x"}, r"config key engine\.seed must be a valid integer, got 'x'"),
        ({"backend": "megatron", "sequence_parallel": True}, "config key engine: .*sequence_parallel requires"),
    ],
)
def test_invalid_engine_section_is_rejected(engine, message):
    with pytest.raises(ConfigError, match=message):
        parse_config(Config, {"model": {"path": "m"}, "engine": engine})
