"""`tidemill engines` on a running job: engines are added and removed while it trains."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from step_metrics import TIMES, read_steps
from tidemill_trainer.cli import DEMO_CONFIG
from tidemill_trainer.demo import write_assets
from tidemill_trainer.ledger import trained_problems
from tidemill_trainer.stalls.process import registered

pytestmark = [
    pytest.mark.slow,
    pytest.mark.ray,
    pytest.mark.sglang,
    pytest.mark.timeout(900),
    pytest.mark.xdist_group("cluster"),
]

_STEPS = 24
_SMALL = (
    *("data.train_batch_size=8", "rollout.n=4", "warmup.max_steps=0", "trainer.test_freq=0"),
    *("trainer.val_before_train=false", f"trainer.total_steps={_STEPS}", "trainer.save_freq=10"),
)
# The episodes of later steps wait for the files that the test creates, so the job does not end before.
_REWARDS = """
import pathlib, time
count = 0

def right_digits(data_source, solution_str, ground_truth, extra_info):
    global count
    count += 1
    for step, name in ((8, "added"), (16, "removed")):
        while count > step * 32 and not (pathlib.Path(__file__).parent / name).exists():
            time.sleep(0.1)
    return sum(a == b for a, b in zip(solution_str, ground_truth)) / 3
"""


@pytest.fixture
def job(start, tmp_path):
    """Start a job with one engine; return it, its folder, and `engines(*args)`, which returns status and output."""
    (tmp_path / "rewards.py").write_text(_REWARDS)
    assets = write_assets(tmp_path / "assets")
    common = (*assets, *_SMALL, f"reward.function={tmp_path}/rewards.py:right_digits", f"trainer.run_dir={tmp_path}")

    def begin(name, *overrides):
        run = tmp_path / name

        def engines(*args):
            command = [sys.executable, "-m", "tidemill_trainer", "engines", str(run), *args]
            done = subprocess.run(command, capture_output=True, text=True, timeout=300)
            return done.returncode, done.stdout + done.stderr

        return start("train", str(DEMO_CONFIG), *common, f"trainer.name={name}", *overrides), run, engines

    return begin


def _replace_engine(job, tmp_path, *overrides) -> Path:
    """Run a job whose engine is replaced by a second one."""
    command, run, engines = job("changed", *overrides)
    command.wait_for(r"rl +2 ")
    status, output = engines()
    assert status == 0
    assert re.search(r"^rollout_0 +\S+ +cpu +\d+ +\d+ unfinished requests +serving$", output, re.MULTILINE), output
    first = command.find("sglang::scheduler")

    status, output = engines("add")
    assert status == 0, output
    assert re.search(r"rollout_1 serves with weight version \d+$", output.strip()), output
    (tmp_path / "added").touch()
    command.wait_for(r"rl +10 ")  # steps with two engines
    status, output = engines("remove", "rollout_0")
    assert status == 0, output
    assert "rollout_0 was removed" in output
    assert not first.is_running()
    status, output = engines("remove")
    assert status == 1
    assert "the run requires one that serves" in output
    _, output = engines()
    assert re.search(r"^rollout_1 .* serving$", output, re.MULTILINE), output
    assert "rollout_0" not in output
    (tmp_path / "removed").touch()
    assert command.end() == 0
    assert not (run / "engine_requests").exists()
    steps = read_steps(run)
    assert sorted(steps) == list(range(1, _STEPS + 1))
    numbers = [row["rollout/num_engines"] for row in steps.values()]
    assert numbers[0] == numbers[-1] == 1
    assert numbers[9] == 2
    assert all(row["weight_update/verified"] == 1 for row in steps.values())
    assert [row["weight_update/version"] for row in steps.values()] == list(steps)
    assert steps[_STEPS]["rollout/num_engine_restarts"] == 0
    assert steps[_STEPS]["ledger/episodes/failed"] == 0
    assert steps[_STEPS]["ledger/episodes/trained"] == 32 * _STEPS
    return run


def test_job_whose_engine_is_replaced_by_another_equals_one_with_the_same_engine(job, tmp_path):
    run = _replace_engine(job, tmp_path)
    same, expected, _ = job("same")
    assert same.end(timeout_s=300) == 0
    steps = read_steps(run)
    for step, row in read_steps(expected).items():
        for name, value in row.items():
            if not name.startswith((*TIMES, "rollout/num_engines")):
                assert steps[step][name] == value, (step, name)
    assert trained_problems(run / "ledger.jsonl") == trained_problems(expected / "ledger.jsonl")


def test_engine_is_replaced_while_later_batches_are_generated(job, tmp_path):
    run = _replace_engine(job, tmp_path, "rollout.max_staleness=2", "algorithm.bypass_mode=true")
    assert max(row["staleness/max"] for row in read_steps(run).values()) == 2


def test_engine_that_does_not_start_is_reported_and_the_job_continues(job, tmp_path):
    command, run, _ = job("killed")
    command.wait_for(r"rl +2 ")
    adding = subprocess.Popen(
        [sys.executable, "-m", "tidemill_trainer", "engines", str(run), "add"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert adding.stdout is not None
    assert any("rollout_1 starts" in line for line in adding.stdout)
    while not (pids := [each.pid for each in registered(run / "logs") if each.name == "rollout_1"]):
        time.sleep(0.2)
    os.kill(pids[0], signal.SIGKILL)
    output, _ = adding.communicate(timeout=120)
    assert adding.returncode == 1
    assert "rollout_1" in output
    (tmp_path / "added").touch()
    (tmp_path / "removed").touch()
    assert command.end() == 0
    assert read_steps(run)[_STEPS]["rollout/num_engines"] == 1


def test_requests_are_refused_in_turns_and_when_the_job_has_ended(job, tmp_path):
    command, run, engines = job("turns", "placement.engines=turns", "actor.num_workers=2")
    command.wait_for(r"rl +2 ")
    for args in (("add",), ("remove", "rollout_0")):
        status, output = engines(*args)
        assert status == 1
        assert 'engines cannot be added or removed with placement.engines="turns"' in output
    (tmp_path / "added").touch()
    (tmp_path / "removed").touch()
    assert command.end() == 0
    status, output = engines("add")
    assert status == 1
    assert f"the run {run} is not running" in output
