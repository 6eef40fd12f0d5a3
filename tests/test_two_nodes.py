"""Runs on two nodes, which are namespaces of this machine: a training rank on each, and two engines."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from step_metrics import TIMES, read_steps
from tidemill_testing.nodes import Node, start_nodes, why_no_nodes

pytestmark = [
    pytest.mark.ray,
    pytest.mark.sglang,
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(why_no_nodes() is not None, reason=str(why_no_nodes())),
]

_SMALL = (
    *("data.train_batch_size=16", "rollout.num_engines=2", "warmup.max_steps=20", "warmup.test_freq=20"),
    *("trainer.test_freq=0", "trainer.val_before_train=false", "trainer.save_freq=2"),
)
_ON_BOTH = ("trainer.ray_address=auto", "trainer.nnodes=2")


@pytest.fixture
def two(tmp_path):
    """Two nodes of one Ray cluster with exactly enough CPUs: an episode worker, 2 ranks and 2 engines."""
    with start_nodes(2, shared=[tmp_path]) as nodes:
        for node, num_cpus in zip(nodes, (3, 2), strict=True):
            node.start_ray(head=nodes[0], num_cpus=num_cpus, timeout_s=400)
        yield nodes


def _start(node: Node, *args: str) -> "subprocess.Popen[str]":
    command = (sys.executable, "-m", "tidemill_trainer", *args)
    return node.start(*command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env={"OMP_NUM_THREADS": "1"})


def _finish(process: "subprocess.Popen[str]", timeout_s: float = 1200) -> str:
    output, _ = process.communicate(timeout=timeout_s)
    assert process.returncode == 0, output
    return output


def _nodes_of(run: Path, group: str) -> list[str]:
    """Return the Ray node of each process of a group that the run registered."""
    lines = [json.loads(line) for line in (run / "logs" / "processes.jsonl").read_text().splitlines()]
    return [line["node"] for line in lines if line["name"].startswith(group)]


def _without_times(step: dict) -> dict:
    return {name: value for name, value in step.items() if not name.startswith(TIMES)}


def test_two_nodes_train_as_one_does_and_their_checkpoint_resumes_on_one(two, tmp_path):
    settings = (*_SMALL, f"trainer.run_dir={tmp_path}", "trainer.total_steps=4")
    _finish(_start(two[0], "demo", *settings, *_ON_BOTH, "trainer.name=two"))
    run = tmp_path / "two"
    assert len(set(_nodes_of(run, "actor"))) == 2  # so each engine maps the memory of one rank, and not of the other
    steps = read_steps(run)
    assert [step["weight_update/verified"] for step in steps.values()] == [1.0] * 4
    for node in two:  # nothing is left
        assert "tidemill-run" not in node.run("ls", "/tmp", "/dev/shm")
        assert "sglang" not in node.run("ps", "-eo", "args")

    here = [sys.executable, "-m", "tidemill_trainer", "demo", *settings, "trainer.name=one"]
    _finish(subprocess.Popen(here, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True))
    expected = read_steps(tmp_path / "one")
    for step in expected:
        assert _without_times(steps[step]) == _without_times(expected[step])

    fewer = ("trainer.nnodes=1", "actor.num_workers=1", "rollout.num_engines=1", "trainer.total_steps=6")
    output = _finish(_start(two[1], "train", str(run / "config.toml"), "--resume", *fewer))
    assert "continuing after step 4" in output
    assert sorted(read_steps(run)) == [1, 2, 3, 4, 5, 6]
