"""Runs that are interrupted, or whose engines take turns, have the result of an uninterrupted run."""

from pathlib import Path

import psutil
import pytest
import torch
from command_process import Command, partial_rewards, run_dir, title
from safetensors.torch import load_file
from step_metrics import TIMES, read_steps
from tidemill_engines.location import file_system
from tidemill_testing.s3 import s3_bucket
from tidemill_trainer.ledger import trained_problems
from tidemill_trainer.run_dir import RunDir

pytestmark = [
    pytest.mark.slow,
    pytest.mark.ray,
    pytest.mark.sglang,
    pytest.mark.timeout(900),
    pytest.mark.xdist_group("cluster"),
]


@pytest.fixture(scope="module")
def uninterrupted(recipe):
    """Arguments of a run of 40 steps, and its folder after it has ended."""
    args = [*recipe, partial_rewards(recipe), "trainer.total_steps=40"]
    command = Command(*args, "trainer.name=uninterrupted")
    try:
        assert command.end(timeout_s=600) == 0
    finally:
        command.kill()
    return args, RunDir(run_dir(recipe) / "uninterrupted")


def _assert_same_result(run: RunDir, expected: RunDir, model: Path | None = None) -> None:
    """Check that weights, metrics and trained problems are those of another run, bit for bit."""
    exported, right_model = (each.path / "checkpoints" / "step_000040" / "huggingface" for each in (run, expected))
    weights, right = (load_file(each / "model.safetensors") for each in (model or exported, right_model))
    assert weights.keys() == right.keys()
    assert all(torch.equal(weights[name], value) for name, value in right.items())
    steps, right_steps = read_steps(run.path), read_steps(expected.path)
    assert sorted(steps) == sorted(right_steps) == list(range(1, 41))
    for step, row in right_steps.items():
        for name, value in row.items():
            if not name.startswith((*TIMES, "ledger/")):
                assert steps[step][name] == value, (step, name)
    assert trained_problems(run.ledger) == trained_problems(expected.ledger)


@pytest.mark.parametrize(("save_freq", "where"), [(4, r"after step (4|8|12)"), (0, "from the beginning")])
def test_killed_training_worker_restarts_the_run_with_the_same_result(start, uninterrupted, save_freq, where):
    args, expected = uninterrupted
    run = RunDir(expected.path.parent / f"killed-{save_freq}")
    limits = [f"trainer.save_freq={save_freq}", "trainer.max_restarts=1"]
    command = start(*args, *limits, f"trainer.name={run.path.name}")
    command.wait_for(r"rl +5 ", timeout_s=600)
    command.find("ray::ActorWorker").kill()
    command.wait_for(rf"rank [01] of group 'actor' .* died .* Restart 1 of at most 1 .* the run continues {where}")
    assert command.end(timeout_s=600) == 0
    _assert_same_result(run, expected)
    last = read_steps(run.path)[40]
    assert last["ledger/episodes/undone"] > 0
    assert last["ledger/episodes/in_flight"] == 0


def test_killed_run_with_checkpoints_in_a_store_is_resumed_with_the_same_result_and_evaluated(start, uninterrupted):
    args, expected = uninterrupted
    run = RunDir(expected.path.parent / "in-store")
    with s3_bucket() as url:
        options = [f"trainer.checkpoint_dir={url}/runs", "trainer.save_freq=4", "rollout.max_staleness=0"]
        command = start(*args, *options, f"trainer.name={run.path.name}")
        command.wait_for(r"rl +9 ", timeout_s=600)
        command.find("ray::RolloutWorker")  # end() checks all processes found so far
        command.process.kill()
        _, alive = psutil.wait_procs(command.started, timeout=240)
        assert not alive, sorted(map(title, alive))
        resumed = start("train", str(run.config), "--resume", after=command)
        resumed.wait_for(rf"continuing after step [48] from {url}/runs/in-store/step_00000[48]")
        assert resumed.end(timeout_s=600) == 0
        assert not (run.path / "checkpoints").exists()
        files = [f"{url}/runs/in-store/step_000040/{name}" for name in ("trainer.json", "engine/engine.json")]
        assert all(file_system(url).isfile(file) for file in files)
        assert start("eval", str(run.path)).end(timeout_s=240) == 0
    _assert_same_result(run, expected, run.path / "downloads" / "step_000040")


def test_run_in_turns_has_the_same_result_as_side_by_side(start, uninterrupted):
    args, expected = uninterrupted
    run = RunDir(expected.path.parent / "turns")
    turns = ["placement.engines=turns", "trainer.save_freq=10", "trainer.max_ckpt_to_keep=9"]
    assert start(*args, *turns, f"trainer.name={run.path.name}").end(timeout_s=600) == 0
    assert len(list((run.path / "checkpoints").iterdir())) == 4
    _assert_same_result(run, expected)
