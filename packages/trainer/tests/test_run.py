import resource
from contextlib import contextmanager
from pathlib import Path

import pytest
from tidemill_trainer.cli import DEMO_CONFIG, main
from tidemill_trainer.config_file import load_config
from tidemill_trainer.run import _run, _Work


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["reward.function=exactmatch"],
            "config key reward.function: expected a registered reward function (exact_match), ",
        ),
        (["optimizer.learning_rate=1"], "unknown config key optimizer.learning_rate"),
        (['data.train_files=["none.jsonl"]'], f"data file {Path('none.jsonl').absolute()} does not exist"),
    ],
)
def test_user_error_is_reported_without_traceback_or_run_folder(
    assets, tmp_path, capfd, monkeypatch, arguments, message
):
    monkeypatch.setattr("signal.signal", lambda *_: None)
    assert main(["train", str(DEMO_CONFIG), *assets, f"trainer.run_dir={tmp_path / 'runs'}", *arguments]) == 1
    err = capfd.readouterr().err
    assert f"error: {message}" in err
    assert "Traceback" not in err
    assert not (tmp_path / "runs").exists()


def test_run_that_begins_again_gives_its_loggers_all_steps(config_file, tmp_path, monkeypatch, progress):
    """The first attempt stops after three steps without a checkpoint."""
    received: list[list[int]] = []

    config = load_config(config_file, [f"trainer.run_dir={tmp_path}", "trainer.name=a", "trainer.save_freq=1"])

    @contextmanager
    def loggers(config, run, progress):
        received.append([row["step"] for row in run.read_metrics()])
        yield

    def attempt(steps, error):
        def do(config, run):
            for step in steps:
                run.append_metrics({"step": step})
            raise error

        return _Work(prepare=lambda: do, after_stop=lambda run: "")

    monkeypatch.setattr("tidemill_trainer.run.open_loggers", loggers)
    for steps, resume in (([1, 2, 3], False), ([1], True)):
        _run(config, "x", progress, attempt(steps, KeyboardInterrupt()), resume=resume)
    assert received == [[], []]


def test_demo_does_not_write_into_an_existing_run(tmp_path, capfd, monkeypatch):
    monkeypatch.setattr("signal.signal", lambda *_: None)
    (tmp_path / "old").mkdir()
    assert main(["demo", f"trainer.run_dir={tmp_path}", "trainer.name=old"]) == 1
    assert "old exists already; choose another trainer.name" in capfd.readouterr().err
    assert list((tmp_path / "old").iterdir()) == []


@pytest.mark.parametrize("name", ["20261129", "true", "über 🌊"])
def test_demo_takes_a_name_that_would_be_another_value_in_toml(name, tmp_path, monkeypatch):
    monkeypatch.setattr("signal.signal", lambda *_: None)
    names = []
    monkeypatch.setattr("tidemill_trainer.run._run", lambda config, *_: names.append(config.trainer.name) or 0)
    assert main(["demo", f"trainer.run_dir={tmp_path}", f'trainer.name="{name}"']) == 0
    assert names == [name]


def test_demo_reports_a_folder_it_cannot_create(tmp_path, capfd, monkeypatch):
    monkeypatch.setattr("signal.signal", lambda *_: None)
    (tmp_path / "file").touch()
    assert main(["demo", f"trainer.run_dir={tmp_path / 'file'}"]) == 1
    err = capfd.readouterr().err
    assert "error: [Errno 20] Not a directory: " in err
    assert "Traceback" not in err


def test_demo_reports_a_full_disk_and_removes_its_folder(tmp_path, capfd, monkeypatch):
    monkeypatch.setattr("signal.signal", lambda *_: None)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))  # writing more fails as on a full disk
    try:
        assert main(["demo", f"trainer.run_dir={tmp_path}", "trainer.name=full"]) == 1
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "error: cannot write the model of the demo to " in capfd.readouterr().err
    assert list(tmp_path.iterdir()) == []
