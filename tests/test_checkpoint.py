"""Checkpoints of runs that are killed while they write one, or run out of memory."""

import os
import re
import signal
import time

import pytest
from step_metrics import read_steps
from tidemill_trainer.cli import DEMO_CONFIG, DEMO_CONFIGS
from tidemill_trainer.demo import write_assets

pytestmark = [
    pytest.mark.slow,
    pytest.mark.ray,
    pytest.mark.sglang,
    pytest.mark.timeout(900),
    pytest.mark.xdist_group("cluster"),
]

_FULL_LOSS = """
from pathlib import Path
import torch
from tidemill_algorithms.losses import vanilla

def full(log_probs, batch):
    if (Path(__file__).parent / "is_full").exists():
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
    return vanilla(log_probs, batch)
"""


_ENDLESS_REWARD = """
import time
calls = []

def endless(data_source, solution_str, ground_truth, extra_info):
    calls.append(1)
    while len(calls) > 32:  # in the second step
        time.sleep(0.1)
    return 0.5
"""


def test_checkpoint_is_complete_while_the_next_step_still_generates(start, ctrl_c, tmp_path):
    (tmp_path / "rewards.py").write_text(_ENDLESS_REWARD)
    command = start(
        *("train", str(DEMO_CONFIG), *write_assets(tmp_path / "assets"), "data.train_batch_size=8", "rollout.n=4"),
        *("warmup.max_steps=0", "trainer.test_freq=0", "trainer.val_before_train=false", "trainer.name=endless"),
        *(f"trainer.run_dir={tmp_path / 'runs'}", "trainer.save_freq=1", "episode.num_workers=1"),
        f"reward.function={tmp_path / 'rewards.py'}:endless",
    )
    command.wait_for(r"rl +1 ")
    deadline = time.monotonic() + 30
    while not (tmp_path / "runs/endless/checkpoints/step_000001/trainer.json").exists():
        assert time.monotonic() < deadline, command.output
        time.sleep(0.1)
    os.killpg(command.process.pid, signal.SIGINT)
    assert command.end() == 130
    assert "Continue from the checkpoint of step 1 with" in command.output


def test_run_killed_while_it_writes_a_checkpoint_in_the_background_resumes_from_the_previous_one(start, tmp_path):
    assets = write_assets(tmp_path / "assets", task="sft")
    args = ["sft", str(DEMO_CONFIGS["sft"]), *assets, f"trainer.run_dir={tmp_path}", "trainer.name=killed"]
    command = start(*args, "trainer.save_freq=1", "trainer.test_freq=1", "data.train_batch_size=512")
    folder = tmp_path / "killed" / "checkpoints"
    command.wait_for(r" s +2 ")
    processes = [*command.started, command.process]
    while not (background := list(folder.glob("step_*/.engine.partial"))):
        assert command.process.poll() is None, command.output
    for process in processes:
        process.kill()
    command.process.wait()
    [unfinished] = background
    assert unfinished.exists(), "the checkpoint was complete before the processes were killed"
    step = int(unfinished.parent.name.rpartition("_")[2])
    assert not (unfinished.parent / "trainer.json").exists()
    resumed = start("sft", str(folder.parent / "config.toml"), "--resume", after=command)
    resumed.wait_for(rf"continuing after step {step - 1} ")
    assert resumed.end() == 0
    assert not list(folder.glob("step_*/.engine.partial"))


def test_run_out_of_memory_names_phase_and_key_and_resumes_with_that_key(start, tmp_path):
    (tmp_path / "full_loss.py").write_text(_FULL_LOSS)
    command = start(
        *("train", str(DEMO_CONFIG), *write_assets(tmp_path / "assets"), "data.train_batch_size=8", "rollout.n=4"),
        *("warmup.max_steps=0", "trainer.test_freq=0", "trainer.val_before_train=false", "trainer.name=full"),
        *(f"trainer.run_dir={tmp_path / 'runs'}", "trainer.save_freq=1", "trainer.total_steps=500"),
        f"algorithm.policy_loss={tmp_path / 'full_loss.py'}:full",
    )
    command.wait_for(r"rl +3 ")
    (tmp_path / "is_full").touch()
    assert command.end() == 1
    command.check_one_error(r"out of memory in the update of the policy, on rank [01] .* Tried to allocate 2\.00 GiB")
    key = "engine.max_token_len_per_gpu"
    assert f"lower {key}, or set model.gradient_checkpointing=true" in command.output
    done = max(read_steps(tmp_path / "runs" / "full"))
    again = re.search(r"Continue from the checkpoint of step (\d+) with: tidemill (.*) --resume", command.output)
    assert again is not None
    assert int(again[1]) == done  # also if it was still written when the memory was full
    (tmp_path / "is_full").unlink()
    more = [f"{key}=2048", "model.gradient_checkpointing=true", f"trainer.total_steps={done + 1}", "--resume"]
    resumed = start(*again[2].split(), *more)
    resumed.wait_for(rf"continuing after step {done} ")
    assert resumed.end() == 0
