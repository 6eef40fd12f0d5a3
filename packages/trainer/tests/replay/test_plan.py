"""What `tidemill replay` refuses before it starts any process."""

import re
import shutil

import pytest
import torch
from tidemill_dataproto import DataProto
from tidemill_rollout import Outcome, Problem
from tidemill_rollout.fork import Fork
from tidemill_trainer.batch_record import BatchRecord, RecordedStep
from tidemill_trainer.checkpoints import Checkpoints
from tidemill_trainer.cli import DEMO_CONFIG, main
from tidemill_trainer.config_file import ConfigError, load_config, read_config, save_config
from tidemill_trainer.replay.plan import replay_plan
from tidemill_trainer.rollout.episode_file import load_episodes, save_episodes
from tidemill_trainer.rollout.episode_task import Episodes, EpisodeSummary, EpisodeTask, Failure
from tidemill_trainer.run_dir import RunDir
from tidemill_trainer.sft.config import SFTConfig


@pytest.fixture
def episodes():
    summary = EpisodeSummary(
        task=EpisodeTask(number=3, problem=Problem(prompt="", id="1-0", ordinal=5), sample=3, seed=9, is_shown=True),
        outcome=Outcome(reward=0.1, status="truncated", reason="length: x", metrics={"acc": 1.0}),
        failures=[Failure(reason="KeyError: 'x'", num_tokens=2)],
        counts={"num_sampled_tokens": 4.0},
        seconds=0.25,
        forks=[Fork(reason="edited", expected="a", received="b")],
    )
    return Episodes(
        rows=DataProto.from_dict({"episode": torch.tensor([3, 3])}),
        summaries=[summary],
        baselines=[summary],
        dropped={2: "surplus"},
        num_generated=7,
        num_lost=1,
        num_restarts=1,
    )


@pytest.fixture
def run(tmp_path, assets, episodes):
    """A run with records of steps 3 to 6 and checkpoints of steps 2 and 4, of which only the folders exist."""
    run = RunDir(tmp_path / "run")
    run.path.mkdir()
    save_config(load_config(DEMO_CONFIG, [*assets, "actor.num_workers=2", "trainer.name=run"]), run.config)
    record, checkpoints = BatchRecord(run.batches), Checkpoints(run.checkpoints, max_to_keep=9)
    for step in range(3, 7):
        record.save(step, RecordedStep(episodes=episodes, metrics={"x": 1.0}, weights={"engine": ["a", "b"]}))
    for step in (2, 4):
        checkpoints.save(step, lambda folder: None)
    return run


def test_episodes_in_a_file_are_unchanged(tmp_path, episodes):
    save_episodes(tmp_path / "file", episodes, start=4)
    loaded, info = load_episodes(tmp_path / "file")
    assert info == {"start": 4}
    assert loaded.rows is not None
    assert loaded.rows["episode"].tolist() == [3, 3]
    for name in ("summaries", "baselines", "dropped", "num_generated", "num_lost", "num_restarts"):
        assert getattr(loaded, name) == getattr(episodes, name)


@pytest.mark.parametrize(
    ("steps", "start", "expected"),
    [(None, 2, range(3, 7)), ((3, 4), 2, range(3, 5)), ((5, 6), 4, range(5, 7)), ((6, 6), 4, range(5, 7))],
)
def test_replay_starts_from_the_newest_checkpoint_before_the_steps(run, steps, start, expected):
    plan = replay_plan(run.path, steps, [])
    assert (plan.start, plan.steps) == (start, expected)
    assert plan.checkpoint == str(run.path / "checkpoints" / f"step_{start:06d}")


def test_run_without_warm_up_can_be_replayed_from_the_initial_model(run):
    for step in (1, 2):
        shutil.copy(BatchRecord(run.batches).path(3), BatchRecord(run.batches).path(step))
    save_config(load_config(run.config, ["warmup.max_steps=0"]), run.config)
    plan = replay_plan(run.path, (1, 1), [])
    assert (plan.start, plan.checkpoint, plan.steps) == (None, None, range(1, 2))


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        ((5, 7), "expected --steps within the recorded steps 3:6, got 5:7"),
        ((1, 3), "expected --steps within the recorded steps 3:6, got 1:3"),
    ],
)
def test_steps_outside_the_record_are_refused(run, steps, message):
    with pytest.raises(ConfigError, match=message):
        replay_plan(run.path, steps, [])


def test_steps_without_an_earlier_checkpoint_are_refused(run):
    shutil.rmtree(run.path / "checkpoints" / "step_000002")
    with pytest.raises(ConfigError, match=r"no checkpoint before step 3; replay steps after 4, and raise trainer.max_"):
        replay_plan(run.path, (3, 6), [])
    assert replay_plan(run.path, None, []).steps == range(5, 7)
    shutil.rmtree(run.checkpoints)
    with pytest.raises(
        ConfigError, match=r"no checkpoint before a recorded step \(recorded: 3:6\); raise trainer.max_"
    ):
        replay_plan(run.path, None, [])


def test_missing_and_truncated_files_of_the_record_are_named(run):
    path = BatchRecord(run.batches).path(4)
    content = path.read_bytes()
    path.write_bytes(content[:-10])
    with pytest.raises(
        ConfigError, match=r"the record of step 4 cannot be read: .*step_000004.safetensors is truncated"
    ):
        replay_plan(run.path, (3, 5), [])
    path.unlink()
    with pytest.raises(ConfigError, match=r"step 4 is not recorded: .*step_000004.safetensors does not exist"):
        replay_plan(run.path, (3, 5), [])
    assert replay_plan(run.path, (6, 6), []).steps == range(5, 7)


def test_run_without_record_and_other_folders_are_refused(run, tmp_path, monkeypatch, capfd):
    monkeypatch.setattr("signal.signal", lambda *_: None)
    shutil.rmtree(run.batches)
    assert main(["replay", str(run.path)]) == 1
    assert "has no record of its batches; train with trainer.save_batches=true" in capfd.readouterr().err
    assert main(["replay", str(tmp_path)]) == 1
    assert re.search(r"expected the folder of a run, got .*; it is runs/NAME", capfd.readouterr().err)
    with pytest.raises(SystemExit):
        main(["replay", str(run.path), "--steps", "5:3"])
    assert "expected two steps such as 3:8, got '5:3'" in capfd.readouterr().err


def test_run_of_sft_is_refused_with_the_command_that_evaluates_it(run, tmp_path):
    (tmp_path / "sft.toml").write_text('[model]\npath = "m"\n[data]\ntrain_files = ["a.jsonl"]\n')
    save_config(read_config(SFTConfig, tmp_path / "sft.toml"), run.config)
    command = rf"tidemill eval CONFIG model\.path={re.escape(run.checkpoints)}/step_\.\.\./huggingface"
    with pytest.raises(ConfigError, match=f"run is a run of `tidemill sft`, .*: {command}$"):
        replay_plan(run.path, None, [])


@pytest.mark.parametrize(
    "override", ["rollout.deterministic=false", "rollout.dtype=bfloat16", "rollout.recompute_kv_cache=false"]
)
def test_generation_that_cannot_be_repeated_is_refused(run, override):
    save_config(load_config(run.config, [override]), run.config)
    with pytest.raises(ConfigError, match=r"with rollout.deterministic=true, .*, got .*; replay without --generation"):
        replay_plan(run.path, None, [], has_generation=True)
    assert replay_plan(run.path, None, []).start == 2


def test_default_steps_end_where_the_record_has_a_gap(run):
    BatchRecord(run.batches).path(5).unlink()
    assert replay_plan(run.path, None, []).steps == range(3, 5)


@pytest.mark.parametrize("is_saved", [False, True])
def test_another_layout_is_refused(run, is_saved):
    overrides = ["actor.num_workers=1"]
    if is_saved:
        save_config(load_config(run.config, overrides), run.config)
    with pytest.raises(
        ConfigError, match=r"step 3 was trained by 2 ranks, and the configuration has actor.num_workers=1"
    ):
        replay_plan(run.path, None, [] if is_saved else overrides)
