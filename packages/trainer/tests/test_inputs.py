import io
import json
import os
import resource
import shutil
from pathlib import Path

import pytest
import torch
from rich.console import Console
from tidemill_trainer.cli import DEMO_CONFIG, main
from tidemill_trainer.config_file import ConfigError, load_config
from tidemill_trainer.data import DataError
from tidemill_trainer.demo import write_assets
from tidemill_trainer.inputs import load_inputs
from tidemill_trainer.progress import Progress


@pytest.fixture(scope="module")
def assets(tmp_path_factory):
    return write_assets(tmp_path_factory.mktemp("assets"))


@pytest.fixture
def shown():
    return Progress(Console(file=io.StringIO()))


def _load(assets, shown, *overrides):
    return load_inputs(load_config(DEMO_CONFIG, [*assets, *overrides]), shown)


def test_the_inputs_of_the_demo(assets, shown):
    inputs = _load(assets, shown)
    assert (len(inputs.train), len(inputs.val)) == (8192, 512)
    assert inputs.reward_fn("addition", "12", "12", None) == 1.0


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model.path=nowhere", r"model\.path: expected .* model in /.*/nowhere, found no config\.json; .*hf download"),
        ("rollout.response_length=60", r"must be <= 64, the number of positions of the model, got 76"),
        ("rollout.tensor_parallel_size=3", r"rollout\.tensor_parallel_size=3 must divide the 4 attention heads"),
    ],
)
def test_a_model_that_does_not_fit(assets, shown, override, message):
    with pytest.raises(ConfigError, match=message):
        _load(assets, shown, override)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["engine.ulysses_sequence_parallel_size=3", "actor.num_workers=3"], r"engine\.ulysses_.*=3 must divide"),
        (["engine.backend=megatron", "engine.pp=3", "actor.num_workers=3"], r"config key engine: pp x vpp = 3 does"),
        (["engine.backend=megatron", "model.frozen=['x']"], r"config key engine: .*has no ModelConfig\.frozen"),
    ],
)
def test_an_engine_that_does_not_fit_the_model(assets, shown, overrides, message):
    with pytest.raises(ConfigError, match=message):
        _load(assets, shown, *overrides)


@pytest.mark.skipif(torch.cuda.is_available(), reason="of machines without a GPU")
@pytest.mark.parametrize("key", ["engine.device", "rollout.device"])
def test_a_gpu_that_is_not_there(assets, shown, key):
    with pytest.raises(ConfigError, match=rf'{key}="cuda" requires a GPU, but torch finds no CUDA device'):
        _load(assets, shown, f"{key}=cuda")


def test_more_workers_than_cpus(assets):
    cpus, out = len(os.sched_getaffinity(0)), io.StringIO()
    with pytest.raises(
        ConfigError, match=rf"num_workers must be <= {8 * cpus}, 8 for each of the {cpus} CPUs .* got {9 * cpus}"
    ):
        _load(assets, Progress(Console(file=out)), f"actor.num_workers={9 * cpus}", "engine.device=cpu")
    assert out.getvalue() == ""
    _load(assets, Progress(Console(file=out)), f"actor.num_workers={cpus + 1}", "engine.device=cpu")
    assert f"actor.num_workers={cpus + 1} is larger than the {cpus} CPUs" in out.getvalue()


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("config.json", "{", r"model\.path: expected JSON in .*config\.json: "),
        ("config.json", "[]", r"model\.path: expected a JSON object in .*config\.json, got \[\]"),
        ("model.safetensors", "cut off", r"model\.path: .*model\.safetensors is damaged"),
        ("model.safetensors", None, r"model\.path: expected model\.safetensors or "),
        ("tokenizer.json", '{"version": 3}', r"model\.path: cannot load a tokenizer from "),
    ],
)
def test_a_damaged_model(assets, shown, tmp_path, file, text, message):
    model = Path(assets[0].removeprefix("model.path="))
    shutil.copytree(model, tmp_path / "model")
    (tmp_path / "model" / file).unlink()
    if text is not None:
        (tmp_path / "model" / file).write_text(text)
    with pytest.raises(ConfigError, match=message):
        _load(assets, shown, f"model.path={tmp_path / 'model'}")


def test_a_warm_up_without_responses(assets, shown, tmp_path):
    (tmp_path / "t.jsonl").write_text(json.dumps({"prompt": "1+1=", "ground_truth": "2"}) + "\n")
    file = f'data.train_files=["{tmp_path / "t.jsonl"}"]'
    with pytest.raises(DataError, match="the warm-up requires a `response` in every row"):
        _load(assets, shown, file)
    assert len(_load(assets, shown, file, "warmup.max_steps=0").train) == 1


def test_exact_match_needs_a_ground_truth_in_every_row(assets, shown, tmp_path):
    rows = [{"prompt": "1+1=", "ground_truth": "2", "response": "2"}, {"prompt": "1+2=", "response": "3"}]
    (tmp_path / "t.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "mine.py").write_text("def f(*_): return 1.0\n")
    file = f'data.train_files=["{tmp_path / "t.jsonl"}"]'
    with pytest.raises(DataError, match=r"t\.jsonl, row 2: expected a `ground_truth`"):
        _load(assets, shown, file)
    assert len(_load(assets, shown, file, f"reward.function={tmp_path / 'mine.py'}:f").train) == 2


def test_skipped_prompts_are_counted_aloud(assets, tmp_path):
    out = io.StringIO()
    rows = [{"prompt": "1+1=", "ground_truth": "2", "response": "2"}, {"prompt": "1" * 30, "response": "2"}]
    (tmp_path / "t.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    overrides = [f'data.train_files=["{tmp_path / "t.jsonl"}"]', "data.overlong_prompts=skip"]
    inputs = _load(assets, Progress(Console(file=out)), *overrides)
    assert len(inputs.train) == 1
    assert "skipped 1 problems of" in out.getvalue()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["reward.function=exactmatch"], "config key reward.function: expected one of exact_match, or"),
        (["optimizer.learning_rate=1"], "unknown config key optimizer.learning_rate"),
        (['data.train_files=["none.jsonl"]'], f"data file {Path('none.jsonl').absolute()} does not exist"),
    ],
)
def test_the_command_says_what_is_wrong_and_leaves_nothing(assets, tmp_path, capfd, monkeypatch, arguments, message):
    monkeypatch.setattr("signal.signal", lambda *_: None)
    assert main(["train", str(DEMO_CONFIG), *assets, f"trainer.run_dir={tmp_path / 'runs'}", *arguments]) == 1
    err = capfd.readouterr().err
    assert f"error: {message}" in err
    assert "Traceback" not in err
    assert not (tmp_path / "runs").exists()


def test_a_demo_does_not_write_into_an_old_run(tmp_path, capfd, monkeypatch):
    monkeypatch.setattr("signal.signal", lambda *_: None)
    (tmp_path / "old").mkdir()
    assert main(["demo", f"trainer.run_dir={tmp_path}", "trainer.name=old"]) == 1
    assert "old exists already; choose another trainer.name" in capfd.readouterr().err
    assert list((tmp_path / "old").iterdir()) == []


def test_a_demo_that_cannot_write_says_so(tmp_path, capfd, monkeypatch):
    monkeypatch.setattr("signal.signal", lambda *_: None)
    (tmp_path / "file").touch()
    assert main(["demo", f"trainer.run_dir={tmp_path / 'file'}"]) == 1
    err = capfd.readouterr().err
    assert "error: [Errno 20] Not a directory: " in err
    assert "Traceback" not in err


def test_a_demo_on_a_full_disk_says_so_and_leaves_nothing(tmp_path, capfd, monkeypatch):
    monkeypatch.setattr("signal.signal", lambda *_: None)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))  # writing more fails as on a full disk
    try:
        assert main(["demo", f"trainer.run_dir={tmp_path}", "trainer.name=full"]) == 1
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "error: cannot write the model of the demo to " in capfd.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_sizes_that_are_seldom_meant_are_told(assets, tmp_path):
    (tmp_path / "t.jsonl").write_text(json.dumps({"prompt": "1+1=", "ground_truth": "2", "response": "2"}) + "\n")
    out = io.StringIO()
    sizes = ["trainer.total_steps=4", "actor.ppo_mini_batch_size=32", "data.train_batch_size=100"]
    _load(assets, Progress(Console(file=out)), f'data.train_files=["{tmp_path / "t.jsonl"}"]', *sizes)
    assert "data.train_batch_size=100 is larger than the 1 training problems" in out.getvalue()
    assert "optimizer.lr_warmup_steps=20 is larger than the 16 optimizer steps" in out.getvalue()


def test_help_lists_the_options(capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["train", "--help"])
    assert stopped.value.code == 0
    assert "--resume" in capsys.readouterr().out
