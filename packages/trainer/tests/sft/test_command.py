"""User errors of `tidemill sft`, which are reported before any process starts."""

from pathlib import Path

import pytest
from tidemill_trainer.cli import DEMO_CONFIGS, main
from tidemill_trainer.config_file import config_to_dict, read_config, save_config
from tidemill_trainer.sft.config import DPOConfig, SFTConfig

RECIPE = Path(__file__).parents[4] / "recipes" / "sft.toml"


@pytest.fixture
def failed(chat_assets, tmp_path, capfd, monkeypatch):
    """`failed("key=value", ...)`: the error of a run that must not start."""
    monkeypatch.setattr("signal.signal", lambda *_: None)

    def run(*overrides):
        folder = f"trainer.run_dir={tmp_path / 'runs'}"
        assert main(["sft", str(DEMO_CONFIGS["sft"]), *chat_assets, folder, *overrides]) == 1
        assert not (tmp_path / "runs").exists()
        return capfd.readouterr().err

    return run


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "data.train_batch_size=2049",
            "data.train_batch_size must be <= 2048, the number of training examples, got 2049",
        ),
        ("data.max_length=129", "data.max_length must be <= 128, the number of positions of the model, got 129"),
        ("engine.max_token_len_per_gpu=100", "data.max_length must be <= 100, the tokens of a micro-batch, got 128"),
        ("data.truncation=left", "data.truncation must be 'error' or 'right', got 'left'"),
        ("trainer.total_epochs=0", "trainer.total_epochs must be >= 1, got 0"),
        ('data.train_files=["none.jsonl"]', f"data file {Path('none.jsonl').absolute()} does not exist"),
        ("data.train_files=[]", "expected rows in data.train_files, which is empty, got none"),
        ("data.messages_key=text", "row 1: expected the column 'text' (data.messages_key)"),
        ("dpo.beta=0.1", "row 1: DPO expects the columns 'chosen' and 'rejected'"),
        ("dpo.beta=0", "dpo.beta must be > 0, got 0"),
        ("dpo.label_smoothing=0.5", "dpo.label_smoothing must be < 0.5, got 0.5"),
        ("rollout.n=8", "unknown config key rollout; known keys: model, data, engine"),
        (
            "data.max_prompt_length=8",
            "unknown config key data.max_prompt_length; known keys: train_files, val_files, train_batch_size, "
            "messages_key, max_length, truncation; this one is a key of `tidemill train`",
        ),
        ("trainer.total_steps=8", "unknown config key trainer.total_steps; did you mean trainer.total_epochs?"),
        ("engine.fsdp_size=4", "engine.fsdp_size = 4 must divide actor.num_workers=2"),
    ],
)
def test_setting_that_does_not_fit_is_rejected(failed, override, message):
    assert f"{message}" in failed(override)


def test_section_dpo_is_absent_by_default_and_saved_with_its_defaults(tmp_path):
    assert read_config(SFTConfig, RECIPE).dpo is None
    assert "dpo" not in config_to_dict(read_config(SFTConfig, RECIPE))
    config = read_config(SFTConfig, RECIPE, [str(RECIPE.with_name("dpo.toml")), "dpo.beta=0.2"])
    assert config.dpo == DPOConfig(beta=0.2, label_smoothing=0.0)
    assert config.data.train_files == ("preferences.jsonl",)
    save_config(config, tmp_path / "saved.toml")
    assert read_config(SFTConfig, tmp_path / "saved.toml") == config


def test_schedule_of_another_length_than_the_run_is_warned_about(chat_assets, progress, terminal):
    from tidemill_trainer.sft.inputs import load_sft_inputs

    schedule = ["optimizer.lr_scheduler=cosine", "optimizer.total_steps=50", "optimizer.lr_warmup_steps=5"]
    config = read_config(SFTConfig, DEMO_CONFIGS["sft"], [*chat_assets, *schedule])
    load_sft_inputs(config, progress)
    assert "optimizer.total_steps=50 differs from the 96 steps of the run" in terminal.getvalue()
