"""Parts of `bench/verl.py` that need no verl: problems, settings and the table."""

import importlib.util
from pathlib import Path

import pyarrow.parquet
import pytest
from tidemill_rollout import SamplingParams
from tidemill_trainer.cli import DEMO_CONFIG
from tidemill_trainer.config import Config
from tidemill_trainer.config_file import read_config
from tidemill_trainer.demo import write_assets
from tidemill_trainer.rollout.episode_worker import with_length
from tidemill_trainer.rollouts import sampling_seeds
from transformers import Qwen3Config

BENCH = Path(__file__).parents[1] / "bench" / "verl"


def load(name: str):
    spec = importlib.util.spec_from_file_location(f"bench_verl_{name}", BENCH / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def config(folder: Path, *overrides: str) -> Config:
    few = ("data.train_batch_size=4", "rollout.n=2", "rollout.response_lengths=[1,2,3,4,5]")
    return read_config(Config, DEMO_CONFIG, [*write_assets(folder / "assets"), *few, *overrides])


def test_each_response_of_verl_has_the_length_of_the_episode_of_tidemill(tmp_path):
    run = config(tmp_path)
    load("inputs").write_problems(run, 3, tmp_path / "problems.parquet")
    rows = pyarrow.parquet.read_table(tmp_path / "problems.parquet").to_pylist()
    assert [row["extra_info"]["index"] for row in rows] == list(range(12))
    lengths = run.rollout.response_lengths
    for step in (1, 2, 3):
        seeds = sampling_seeds([run.trainer.seed, step], 8)
        expected = [with_length(SamplingParams(max_tokens=6), lengths, seed).max_tokens for seed in seeds]
        assert [n for row in rows[4 * step - 4 : 4 * step] for n in row["extra_info"]["lengths"]] == expected


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("rollout.response_lengths=[]", "--lengths"),
        ("rollout.max_staleness=1", "max_staleness"),
        ("algorithm.kl_loss_coef=0.1", "only model"),
    ],
)
def test_configuration_that_verl_cannot_repeat_is_refused(tmp_path, override, message):
    inputs = load("inputs")
    inputs.check(config(tmp_path))
    with pytest.raises(SystemExit, match=message):
        inputs.check(config(tmp_path / "other", override, "algorithm.bypass_mode=true"))


def test_overrides_replace_settings_whether_or_not_verl_knows_their_key():
    settings = {"a.b": 1, "+a.c": 2}
    assert load("inputs").overridden(settings, ["+a.b=3", "a.c=4", "+d=5"]) == ["a.b=3", "+a.c=4", "+d=5"]


def step(seconds: float, mean: float) -> dict:
    result = load("result")
    lengths = dict.fromkeys(result.LENGTHS, 8.0) | {"response_length/mean": mean}
    row = {"step": 3, "end_s": 100.0, "perf/total_num_tokens": 640, "timing_s/gen": 1.5, **lengths}
    return result.verl_steps([{"end_s": 100.0 - seconds}, row], 1)[0]


def test_table_has_the_ratio_of_the_medians_and_phases_add_up_to_the_step():
    assert sum(step(4.0, 5.0)["phases"].values()) == pytest.approx(4.0)
    lines = list(load("result").table([step(2.0, 5.0)] * 3, [step(4.0, 5.0), step(5.0, 5.0), step(9.0, 5.0)]))
    assert next(line for line in lines if line.startswith("step ")).split()[-1] == "2.50"
    assert "2.50 times as long; its shortest one 2.00 times" in lines[-1]


def test_different_lengths_are_reported():
    warnings = load("result").warnings
    assert not list(warnings([step(2.0, 5.0)], [step(4.0, 5.0)]))
    [line] = warnings([step(2.0, 5.0)], [step(4.0, 5.1)])
    assert "response_length/mean of step 3 is 5.00 with tidemill and 5.10 with verl" in line


@pytest.mark.parametrize(("hidden", "tokens"), [(64, 32768), (1024, 32768), (2048, 16384), (4096, 8192)])
def test_micro_batches_of_verl_have_fewer_tokens_for_wider_models(tmp_path, hidden, tokens):
    Qwen3Config(hidden_size=hidden).save_pretrained(tmp_path / "model")
    run = config(tmp_path, f"model.path={tmp_path / 'model'}")
    settings = load("inputs").verl_settings(run, tmp_path, 7, 1)
    assert settings["actor_rollout_ref.actor.ppo_max_token_len_per_gpu"] == tokens
