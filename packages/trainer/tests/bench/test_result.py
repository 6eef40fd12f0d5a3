import json

import pytest
from tidemill_engines import ModelConfig
from tidemill_trainer.bench.page import page
from tidemill_trainer.bench.result import measure
from tidemill_trainer.bench.shapes import SHAPES, write_inputs
from tidemill_trainer.cli import BENCH_CONFIG, DEMO_CONFIG, _parse
from tidemill_trainer.config_file import ConfigError, load_config
from tidemill_trainer.inputs import load_inputs
from tidemill_trainer.metrics import QUANTILES
from tidemill_trainer.plan.model import count_model


def _line(step, gen_s):
    lengths = {f"response_length/{name}": 512.0 for name in ("min", "mean", "max", *(f"p{q}" for q in QUANTILES))}
    tokens = {f"ledger/tokens/{kind}": step * count for kind, count in (("generated", 8000.0), ("trained", 7000.0))}
    tokens |= {f"ledger/tokens/{kind}": step * 500.0 for kind in ("dropped", "failed")}
    return {
        "step": step,
        "timing_s/gen": gen_s,
        "timing_s/old_log_prob": 0.5,
        "timing_s/adv": 0.1,
        "timing_s/update_actor": 3.0,
        "timing_s/update_weights": 0.4,
        "weight_update/seconds": 0.3,
        "episode/seconds/p90": 1.0,
        "episode/seconds/max": 1.5,
        "perf/mfu/actor": 0.5,
        "perf/total_num_tokens": 10000.0,
        "perf/max_memory_allocated_gb": 20.0 + step,
        "prompt_length/mean": 128.0,
        "response_length/std": 0.0,
        **lengths,
        **tokens,
    }


@pytest.fixture
def sizes(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(SHAPES["qwen3-0.6b"]))
    return count_model(ModelConfig(path=str(tmp_path)))


@pytest.fixture
def result(sizes):
    lines = [_line(2, 30.0), _line(3, 5.0), _line(4, 6.0), _line(5, 7.0)]
    figures = measure(load_config(BENCH_CONFIG), sizes, lines, [100.0, 110.0, 121.0, 133.0], 2.0)
    machine = {"gpu": "NVIDIA H200", "cpus": 16}
    about = {"command": "tidemill bench", "date": "2026-11-25", "commit": None, "warmup_steps": 2, "seed": 0}
    about |= {"placement": "turns", "machine": machine, "versions": {"python": "3.12"}, "busy_cores": {"actor_0": 1.5}}
    return about | figures | {"peak_memory_gib": {"the episodes": {"host": 5.0, "gpu": 80.0}}}


def test_figures_are_those_of_the_measured_steps(result):
    rates = result["rates"]
    assert rates["seconds"] == {"min": 10.0, "median": 11.0, "max": 12.0}
    assert rates["tokens/s"]["max"] == 1000.0
    assert rates["tokens/s/GPU"]["max"] == 500.0
    assert rates["sampled tokens/s"]["max"] == pytest.approx(800.0)
    assert result["tokens"]["trained"]["median"] == 7000.0
    assert result["phase_seconds"]["generation"] == {"min": 4.5, "median": 5.5, "max": 6.5}
    assert sum(result["phase_shares"].values()) == pytest.approx(1.0)
    assert sum(sum(step["phases"].values()) for step in result["steps"]) == pytest.approx(33.0)
    assert result["response_length"]["p50"] == 512.0
    assert result["peak_torch_gib_of_update"] == 25.0


def test_page_names_the_phase_that_costs_most(result):
    text = page(result)
    assert "11.00 s on average (median 11.00, 10.00 to 12.00; 3 steps after 2 for warm-up), with 909 tokens/s" in text
    assert "Most of it is **generation**: 50.0%" in text
    assert "2 x NVIDIA H200" in text
    assert "| share of peak memory bandwidth while decoding | unknown | unknown | unknown |" in text  # no GPU here
    assert "| the episodes | 80.0 | 5.0 |" in text


def test_steps_of_an_overlapping_run_have_no_bandwidth(sizes):
    config = load_config(BENCH_CONFIG, ["rollout.max_staleness=1", "algorithm.bypass_mode=true"])
    figures = measure(config, sizes, [_line(1, 5.0), _line(2, 5.0)], [0.0, 10.0], 0.0)
    assert set(figures["rates"]) == {"seconds", "tokens/s", "sampled tokens/s", "training MFU"}
    assert figures["phase_seconds"]["waiting for episodes"]["median"] == 5.0


def test_inputs_of_a_shape_are_created_without_weights(tmp_path, progress):
    overrides = [f"trainer.run_dir={tmp_path}", "data.train_batch_size=3", "data.max_prompt_length=40"]
    made = write_inputs(load_config(BENCH_CONFIG, overrides), num_steps=2)
    config = load_config(BENCH_CONFIG, [*overrides, *made])
    inputs = load_inputs(config, progress)
    assert inputs.train is not None
    assert len(inputs.train) == 6
    assert {len(ids) for ids in inputs.train["prompts"].unbind()} == {40}
    assert config.model.init_seed == 0
    assert not list(tmp_path.rglob("*.safetensors"))


def test_inputs_of_another_model_are_its_own(tmp_path):
    config = load_config(BENCH_CONFIG, [f"model.path={tmp_path}", f"trainer.run_dir={tmp_path}"])
    assert write_inputs(config, num_steps=2) == []


def test_names_of_models_are_listed_if_there_is_no_such_folder(tmp_path):
    config = load_config(BENCH_CONFIG, ["model.path=qwen3-5b", f"trainer.run_dir={tmp_path}"])
    with pytest.raises(ConfigError, match="'qwen3-5b' is neither a folder"):
        write_inputs(config, num_steps=2)


def test_arguments_of_the_command():
    args = _parse(["bench", "model.path=qwen3-8b", "--lengths", "64", "rollout.n=4"])
    assert (args.config, args.overrides) == (BENCH_CONFIG, ["model.path=qwen3-8b", "rollout.n=4"])
    assert (args.steps, args.warmup, args.lengths) == (5, 2, "64")
    args = _parse(["bench", str(DEMO_CONFIG), "a.toml", "--steps", "3"])
    assert (args.config, args.overrides, args.steps) == (DEMO_CONFIG, ["a.toml"], 3)
    assert _parse(["bench"]).config == BENCH_CONFIG
