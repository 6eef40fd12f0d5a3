import os
import signal
import subprocess
import sys

import pytest
from tidemill_trainer.cli import main


def test_overrides_are_accepted_before_and_after_options(config_file, capsys):
    for args in (["trainer.x=1", "--resume"], ["--resume", "trainer.x=1"]):
        assert main(["train", str(config_file), *args, "--shuffle-rewards"]) == 1
        assert "unknown config key trainer.x" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        main(["train", str(config_file), "--resume", "trainer.seed=1", "--bogus"])
    assert "unrecognized arguments: --bogus" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        main(["train", str(config_file), "--res"])
    assert "unrecognized arguments: --res" in capsys.readouterr().err


def test_help_lists_the_options(capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["train", "--help"])
    assert stopped.value.code == 0
    assert "--resume" in capsys.readouterr().out


def test_demo_is_chosen_by_name_and_overrides_may_come_without_one(monkeypatch, capsys):
    from tidemill_trainer import run

    seen = []
    monkeypatch.setattr("signal.signal", lambda *_: None)
    monkeypatch.setattr(run, "demo", lambda task, config, overrides: seen.append((task, config.stem, overrides)) or 0)
    for args in ([], ["trainer.seed=1"], ["tools", "trainer.seed=1"], ["--shuffle-rewards", "tools"]):
        assert main(["demo", *args]) == 0
    assert seen == [
        ("addition", "demo", []),
        ("addition", "demo", ["trainer.seed=1"]),
        ("tools", "demo_tools", ["trainer.seed=1"]),
        ("tools", "demo_tools", ["algorithm.shuffle_rewards=true"]),
    ]
    with pytest.raises(SystemExit, match="2"):
        main(["demo", "tool"])
    assert "there is no demo 'tool'; the demos are: addition, tools" in capsys.readouterr().err


def test_request_for_a_report_does_not_end_a_command_before_its_run_starts(capsys):
    assert main(["plan", "nowhere.toml"]) == 1
    os.kill(os.getpid(), signal.SIGUSR1)


@pytest.mark.parametrize("command", ["train", "sft", "plan", "bench", "doctor"])
def test_a_missing_file_is_reported_before_torch_is_imported(command, tmp_path):
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "tidemill_trainer", command, str(tmp_path / "none.toml")],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert f"error: config file {tmp_path / 'none.toml'} does not exist; check the path\n" in done.stderr
    assert " torch" not in done.stderr
