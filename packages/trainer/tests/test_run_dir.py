import json
import math
import multiprocessing
import os
import re
import resource
import shlex
import shutil
import time
from datetime import date
from decimal import Decimal
from pathlib import Path

import numpy as np
import pytest
import torch
from tidemill_dataproto import DataProto, ragged
from tidemill_trainer.checkpoints import Checkpoints
from tidemill_trainer.cli import DEMO_CONFIG, DEMO_CONFIGS
from tidemill_trainer.config_file import ConfigError, load_config, read_config, with_absolute_paths
from tidemill_trainer.run_dir import RunDir, open_run
from tidemill_trainer.sft.config import SFTConfig


def _config(tmp_path, *overrides):
    return load_config(DEMO_CONFIG, [f"trainer.run_dir={tmp_path}", *overrides])


def _open(config, stem, *, resume):
    with open_run(config, stem, resume=resume) as run:
        return run


def _begin(run, *, saved=True):
    """Leaves behind what a run has after some steps."""
    run.append_metrics({"step": 1, "phase": "rl"})
    run.append_rollouts([{"step": 1}])
    if saved:
        Checkpoints(run.checkpoints, max_to_keep=1).save(1, lambda folder: None)


def test_folder_of_a_run_is_not_reused_by_a_new_run(tmp_path):
    config = _config(tmp_path, "trainer.name=a")
    run = _open(config, "x", resume=False)
    _begin(run)
    assert load_config(run.config) == with_absolute_paths(config)
    # The saved file is enough to resume.
    assert _open(load_config(run.config), "config", resume=True).path == run.path
    with pytest.raises(
        ConfigError, match=r"a exists already; continue it with --resume, or choose another trainer\.name"
    ):
        _open(config, "x", resume=False)
    assert _open(config, "x", resume=True).path == run.path


def test_checkpoints_elsewhere_belong_to_the_run_of_their_name(tmp_path):
    url = f"file://{tmp_path}/elsewhere"
    config = _config(tmp_path, "trainer.name=a", f"trainer.checkpoint_dir={url}")
    run = _open(config, "x", resume=False)
    assert run.checkpoints == RunDir(run.path).checkpoints == f"{url}/a"
    _begin(run)
    assert RunDir(run.path).newest_checkpoint() == 1
    assert _open(config, "x", resume=True).path == run.path
    shutil.rmtree(run.path)
    with pytest.raises(ConfigError, match=r"elsewhere/a has the checkpoints of another run of this name; choose"):
        _open(config, "x", resume=False)
    relative = with_absolute_paths(_config(tmp_path, "trainer.checkpoint_dir=here"))
    assert relative.trainer.checkpoint_dir == str(Path("here").absolute())


def test_saved_config_has_absolute_paths(tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    (tmp_path / "there").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    paths = ["model.path=m", "data.train_files=['t.jsonl']", "data.val_files=['v.jsonl']", "reward.function=r.py:score"]
    run = _open(load_config(DEMO_CONFIG, [*paths, "trainer.name=a"]), "x", resume=False)
    monkeypatch.chdir(tmp_path / "there")
    config = load_config(run.config)
    here = str(tmp_path / "here")
    assert config.model.path == f"{here}/m"
    assert config.data.train_files == (f"{here}/t.jsonl",)
    assert config.data.val_files == (f"{here}/v.jsonl",)
    assert config.reward.function == f"{here}/r.py:score"
    assert _open(config, "config", resume=True).path == tmp_path / "here" / "runs" / "a"


@pytest.mark.parametrize("function", ["exact_match", "pkg.mod:score"])
def test_reward_function_that_is_not_a_file_keeps_its_name(tmp_path, function):
    assert with_absolute_paths(_config(tmp_path, f"reward.function={function}")).reward.function == function


def test_resume_rejects_another_experiment_and_allows_more_steps(tmp_path):
    _begin(_open(_config(tmp_path, "trainer.name=a"), "x", resume=False))
    with pytest.raises(
        ConfigError, match=r"cannot resume .* values of optimizer\.lr \(there 0.0004, now 1.0\), rollout\.n"
    ):
        _open(_config(tmp_path, "trainer.name=a", "optimizer.lr=1.0", "rollout.n=3"), "x", resume=True)
    with pytest.raises(ConfigError, match=r"with other values of trainer\.seed \(there .*, now .*\); use"):
        _open(_config(tmp_path, "trainer.name=a", "trainer.seed=7"), "x", resume=True)
    allowed = ["trainer.total_steps=999", "actor.timeout_s=7", "episode.max_retries=0", "critic.num_workers=2"]
    run = _open(_config(tmp_path, "trainer.name=a", *allowed), "x", resume=True)
    assert load_config(run.config).trainer.total_steps == 999


def test_resume_of_a_run_of_another_command_names_its_configuration_and_the_command(tmp_path):
    _begin(_open(_config(tmp_path, "trainer.name=a"), "x", resume=False))
    fine_tuning = read_config(SFTConfig, DEMO_CONFIGS["sft"], [f"trainer.run_dir={tmp_path}", "trainer.name=a"])
    message = r"cannot resume .*/a: .*/a/config\.toml: unknown config key .*; this one is a key of `tidemill train`"
    with pytest.raises(ConfigError, match=message):
        _open(fine_tuning, "x", resume=True)


def test_damaged_line_of_metrics_is_named(tmp_path):
    run = _open(_config(tmp_path, "trainer.name=a"), "x", resume=False)
    run.metrics.write_text('{"step": 1}\n{"step" 2}\n{"step": 3}\n')
    with pytest.raises(ConfigError, match=r"/metrics\.jsonl, line 2: expected JSON: .*; remove the line"):
        run.remove_after(3)


def test_resume_allows_more_epochs_and_rejects_fewer(tmp_path):
    def config(total_epochs):
        overrides = [f"trainer.run_dir={tmp_path}", "trainer.name=a", f"trainer.total_epochs={total_epochs}"]
        return read_config(SFTConfig, DEMO_CONFIGS["sft"], overrides)

    run = _open(config(3), "x", resume=False)
    _begin(run)
    with pytest.raises(
        ConfigError, match=r"trainer\.total_epochs \(there 3, now 2; it may only be raised\); use those"
    ):
        _open(config(2), "x", resume=True)
    _open(config(5), "x", resume=True)
    assert read_config(SFTConfig, run.config).trainer.total_epochs == 5


@pytest.mark.parametrize("folder", ["/proc/runs", __file__])
def test_folder_that_cannot_be_created_is_an_error_of_its_key(folder):
    config = load_config(DEMO_CONFIG, [f"trainer.run_dir={folder}"])
    with pytest.raises(ConfigError, match=f"config key trainer.run_dir: cannot create {folder}/x-.*: N"):
        _open(config, "x", resume=False)


def _rows(*prompts, tokens=((1, 2), (3,))):
    prompt = np.array(prompts, dtype=object)
    return DataProto.from_dict(
        {"input_ids": ragged.ragged_from_list([torch.tensor(row) for row in tokens])}, {"prompt": prompt}
    )


def test_resume_rejects_other_training_data(tmp_path):
    config = _config(tmp_path, "trainer.name=a")
    run = _open(config, "x", resume=False)
    run.check_data(_rows("a", [{"role": "user", "content": "b"}]))
    run.check_data(_rows("a", "c"))  # no step depends on the rows yet
    _begin(run)
    run.check_data(_rows("a", "c"))
    for other in (_rows("a", "d"), _rows("c", "a"), _rows("a", "c", tokens=((1,), (2, 3)))):
        with pytest.raises(
            ConfigError, match=r"cannot resume .*/a: the training data has changed .*2 rows there, 2 now"
        ):
            run.check_data(other)
    with pytest.raises(ConfigError, match=r"2 rows there, 3 now"):
        run.check_data(_rows("a", "c", "c", tokens=((1,), (2,), (3,))))
    (run.path / "data.json").unlink()  # of an earlier version
    run.check_data(_rows("a", "d"))


def test_resume_on_a_full_disk_keeps_the_files_of_the_run(tmp_path):
    config = _config(tmp_path, "trainer.name=a")
    run = _open(config, "x", resume=False)
    run.check_data(_rows("a", "b"))
    _begin(run)
    before = run.config.read_bytes(), (run.path / "data.json").read_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    for limit, work in ((100, lambda: _open(config, "x", resume=True)), (10, lambda: run.check_data(_rows("a", "b")))):
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))  # writing more fails as on a full disk
        try:
            with pytest.raises(OSError, match="File too large"):
                work()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert (run.config.read_bytes(), (run.path / "data.json").read_bytes()) == before
    assert _open(load_config(run.config), "config", resume=True).path == run.path


def test_resume_without_a_name_uses_the_newest_run_of_the_stem(tmp_path):
    with pytest.raises(ConfigError, match=r"expected a run to resume at .*mine-\*, found none; check"):
        _open(_config(tmp_path), "mine", resume=True)
    run = _open(_config(tmp_path), "mine", resume=False)
    _open(_config(tmp_path), "mine-too", resume=False)
    assert _open(_config(tmp_path), "mine", resume=True).path == run.path
    _begin(run)
    (tmp_path / "mine-99990101-000000").mkdir()  # a start that failed
    assert _open(_config(tmp_path), "mine", resume=True).path == run.path


def test_run_without_a_checkpoint_begins_again_only_by_resume(tmp_path):
    config = _config(tmp_path, "trainer.name=a")
    _begin(_open(config, "x", resume=False), saved=False)
    with pytest.raises(ConfigError, match="exists already; continue it with --resume"):
        _open(config, "x", resume=False)
    run = _open(config, "x", resume=True)
    assert len(run.read_metrics()) == len(run.read_rollouts()) == 1
    warnings: list[str] = []
    of_loggers = [run.path / "loggers", run.path / "tensorboard"]  # with what they have received of the attempt
    for folder in of_loggers:
        folder.mkdir()
    for _ in range(2):
        run.begin(warnings.append)
        assert not any(map(Path.exists, of_loggers))
        assert run.read_metrics() == run.read_rollouts() == []
    [moved] = run.path.glob("stopped-*")
    assert warnings == [f"the run has no checkpoint, so it begins again; the metrics of its steps are now in {moved}"]
    assert len(RunDir(moved).read_metrics()) == len(RunDir(moved).read_rollouts()) == 1


def test_run_that_saves_no_checkpoint_cannot_be_resumed(tmp_path):
    config = _config(tmp_path, "trainer.name=a", "trainer.save_freq=-1")
    run = _open(config, "x", resume=False)
    _begin(run, saved=False)
    for value in (-1, 5):
        with pytest.raises(ConfigError, match=r"saves no checkpoint \(trainer\.save_freq=-1\); choose another"):
            _open(_config(tmp_path, "trainer.name=a", f"trainer.save_freq={value}"), "x", resume=True)
    assert len(run.read_metrics()) == len(run.read_rollouts()) == 1


@pytest.mark.parametrize("resume", [True, False])
def test_run_whose_start_failed_can_start_again_with_other_settings(tmp_path, resume):
    run = _open(_config(tmp_path, "trainer.name=a", "optimizer.lr=1.0"), "x", resume=False)
    run.metrics.write_text('{"step": 0, "ph')
    assert _open(_config(tmp_path, "trainer.name=a", "optimizer.lr=0.5"), "x", resume=resume).path == run.path
    assert load_config(run.config).optimizer.lr == 0.5


@pytest.mark.parametrize("resume", [True, False])
def test_run_in_use_is_rejected_and_unchanged(tmp_path, resume):
    config = _config(tmp_path, "trainer.name=a")
    with open_run(config, "x", resume=False) as run:
        before = run.config.read_bytes()
        with pytest.raises(ConfigError, match=rf"a is in use by process {os.getpid()} on .*; wait until it ends"):
            _open(_config(tmp_path, "trainer.name=a", "trainer.total_steps=7"), "x", resume=resume)
        assert run.config.read_bytes() == before
    _open(config, "x", resume=True)


def test_message_of_a_stopped_run_explains_how_to_continue(tmp_path):
    run = _open(_config(tmp_path, "trainer.name=a"), "x", resume=False)
    first = run.how_to_continue("train", saves=True)
    assert f"before its first step. Start it again with: tidemill train {run.config}" in first
    assert _open(load_config(run.config), "config", resume=False).path == run.path
    _begin(run, saved=False)
    assert re.search(r"1, before its first checkpoint.* --resume$", run.how_to_continue("train", saves=True))
    assert re.search(r"1 and saves no checkpoint \(.*save_freq=-1\)", run.how_to_continue("train", saves=False))
    _begin(run)
    assert f"step 1 with: tidemill train {run.config} --resume" in run.how_to_continue("train", saves=True)


def test_command_that_continues_a_run_can_be_pasted_into_a_shell(tmp_path):
    config = _config(tmp_path / "my runs", "trainer.name=it's (1)")
    run = _open(config, "x", resume=False)
    _begin(run)
    command = run.how_to_continue("train", saves=True).partition(" with: ")[2]
    assert shlex.split(command) == ["tidemill", "train", str(run.config), "--resume"]


def _hold(config, opened):
    with open_run(config, "x", resume=True):
        opened.set()
        time.sleep(1000)


def test_killed_process_releases_the_lock_of_its_run(tmp_path):
    run = _open(_config(tmp_path, "trainer.name=a"), "x", resume=False)
    fork = multiprocessing.get_context("fork")
    opened = fork.Event()
    process = fork.Process(target=_hold, args=(load_config(run.config), opened))
    process.start()
    assert opened.wait(60)
    with pytest.raises(ConfigError, match=f"in use by process {process.pid} "):
        _open(load_config(run.config), "x", resume=True)
    process.kill()
    process.join()
    assert _open(load_config(run.config), "x", resume=True).path == run.path


def test_nonfinite_metrics_and_parquet_types_are_written_as_json(tmp_path):
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    run = RunDir(tmp_path)
    run.append_metrics({"step": 1, "norm": math.inf, "loss": math.nan, "lr": 0.5})
    run.append_rollouts([{"step": 1, "ground_truth": [Decimal("1.5"), date(2026, 1, 2), b"x"]}])
    assert json.loads(run.metrics.read_text(), parse_constant=refuse) == {
        "step": 1,
        "norm": None,
        "loss": None,
        "lr": 0.5,
    }
    assert run.read_rollouts() == [{"step": 1, "ground_truth": ["1.5", "2026-01-02", "b'x'"]}]


def test_remove_after_removes_later_steps_and_an_incomplete_line(tmp_path):
    run = RunDir(tmp_path)
    for step in (0, 1, 2, 3):
        run.append_metrics({"step": step, "x": step / 3})
        run.append_rollouts([{"step": step}, {"step": step}])
    with run.metrics.open("a") as lines:
        lines.write('{"step": 4, "x"')
    run.remove_after(2)
    assert run.read_metrics() == [{"step": step, "x": step / 3} for step in (0, 1, 2)]
    assert len(run.read_rollouts()) == 6


def test_resumed_run_may_have_other_numbers_of_nodes_ranks_and_engines(tmp_path):
    run = _open(_config(tmp_path, "trainer.name=a"), "x", resume=False)
    _begin(run)
    others = ["trainer.name=a", "trainer.nnodes=2", "actor.num_workers=4", "rollout.num_engines=3"]
    assert _open(_config(tmp_path, *others), "x", resume=True).path == run.path
