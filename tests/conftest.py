"""One cluster of the trainer for all tests of the loop: Ray, two FSDP2 workers and an SGLang engine; and commands."""

import os
import sys
from pathlib import Path

import pytest
from rich.console import Console
from tidemill_trainer.cli import DEMO_CONFIG
from tidemill_trainer.cluster import Cluster
from tidemill_trainer.config_file import load_config
from tidemill_trainer.demo import write_assets
from tidemill_trainer.progress import Progress
from tidemill_trainer.run_dir import RunDir

sys.path.insert(0, str(Path(__file__).parent))  # for `command_process` and `step_metrics`
from command_process import SMALL, Command

# Exact matches are too rare after a short warm-up. With partial rewards, every group has a gradient.
_REWARDS = """
import os, pathlib, signal
VICTIM = pathlib.Path(__file__).parent / "victim"

def right_digits(data_source, solution_str, ground_truth, extra_info):
    right = sum(a == b for a, b in zip(solution_str, ground_truth)) / max(len(solution_str), len(ground_truth))
    return {"score": right, "acc": solution_str == ground_truth}

def equal_for_half(data_source, solution_str, ground_truth, extra_info):
    if int(ground_truth) % 2:
        return 1.0
    return right_digits(data_source, solution_str, ground_truth, extra_info)

def with_engine_death(data_source, solution_str, ground_truth, extra_info):
    try:
        os.kill(int(VICTIM.read_text()), signal.SIGKILL)  # once
        VICTIM.unlink()
    except FileNotFoundError:
        pass
    return right_digits(data_source, solution_str, ground_truth, extra_info)

broken_problems = set()

def broken(data_source, solution_str, ground_truth, extra_info):
    if not broken_problems:
        broken_problems.add(ground_truth)
    if ground_truth in broken_problems:  # all samples of the first problem
        return 1 / 0
    return right_digits(data_source, solution_str, ground_truth, extra_info)

scored = set()

def almost_all_broken(data_source, solution_str, ground_truth, extra_info):
    if scored:
        return 1 / 0
    scored.add(ground_truth)
    return 1.0
"""


@pytest.fixture(scope="session")
def quiet():
    with open(os.devnull, "w") as devnull:
        yield Progress(Console(file=devnull))


@pytest.fixture(scope="session")
def make_config(tmp_path_factory):
    """Return a small configuration of the demo: 8 prompts with 8 responses each."""
    folder = tmp_path_factory.mktemp("assets")
    assets = write_assets(folder)
    (folder / "rewards.py").write_text(_REWARDS)
    small = [
        f"reward.function={folder / 'rewards.py'}:right_digits",
        "data.train_batch_size=8",
        "rollout.n=8",
        "trainer.total_steps=8",
        "trainer.save_freq=4",
        "trainer.max_ckpt_to_keep=3",
        "trainer.test_freq=4",
        "engine.peak_tflops=0.5",
        "warmup.max_steps=20",
        "warmup.test_freq=20",
    ]

    def make(*overrides):
        return load_config(DEMO_CONFIG, [*assets, *small, *overrides])

    return make


@pytest.fixture(scope="module")
def cluster(make_config, quiet, tmp_path_factory):
    with Cluster(make_config(), RunDir(tmp_path_factory.mktemp("cluster")), quiet) as cluster:
        cluster.wait_ready()
        yield cluster


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    """Arguments of a small run; `run_dir` of `command_process` gives its folder."""
    folder = tmp_path_factory.mktemp("command")
    assets = write_assets(folder / "assets")
    return ["train", str(DEMO_CONFIG), *assets, *SMALL, f"trainer.run_dir={folder / 'runs'}"]


@pytest.fixture
def start():
    """`start("train", ...)`: a `Command` that is killed after the test."""
    commands: list[Command] = []

    def start(*args: str, after: Command | None = None) -> Command:
        commands.append(Command(*args, after=after))
        return commands[-1]

    yield start
    for command in commands:
        command.kill()
