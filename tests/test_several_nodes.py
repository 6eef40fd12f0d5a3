"""Runs on several nodes, which are namespaces of this machine, with a training rank on each and two engines."""

import json
import re
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from step_metrics import TIMES, read_steps
from tidemill_testing.nodes import Node, start_nodes, why_no_nodes
from tidemill_trainer.ledger import trained_problems
from tidemill_trainer.run_dir import RunDir

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
# An engine and a training rank share the GPU of a node. Between the nodes, NCCL has sockets alone.
_SHARED_GPU = (
    *("actor.num_gpus_per_worker=0.5", "rollout.num_gpus_per_engine=0.5", "rollout.mem_fraction_static=0.2"),
    *("rollout.dtype=bfloat16", "engine.param_dtype=bfloat16", "rollout.deterministic=false", "optimizer.lr=1e-4"),
    'rollout.engine_args={attention_backend="triton",sampling_backend="pytorch",disable_cuda_graph=true}',
)
_STORE = {
    **{"AWS_ENDPOINT_URL": "http://10.77.0.1:5000", "AWS_DEFAULT_REGION": "us-east-1"},
    **{"AWS_ACCESS_KEY_ID": "tests", "AWS_SECRET_ACCESS_KEY": "tests"},
}
# Waits until the store on another node answers.
_MAKE_BUCKET = """
import fsspec, socket, time
while socket.socket().connect_ex(("10.77.0.1", 5000)):
    time.sleep(0.2)
fsspec.filesystem("s3").mkdir("tests")
"""
_ONLY_SOCKETS = {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1", "NCCL_DEBUG": "INFO"}


@pytest.fixture
def cluster(tmp_path):
    """`cluster(3, 2)`: nodes of one Ray cluster with these numbers of CPUs; the first one is the head.

    With `env`, it returns environment variables of a node by its number.
    """
    with ExitStack() as stack:

        def start(*num_cpus: int, env: Callable[[int], dict[str, str]] = lambda _: {}) -> list[Node]:
            nodes = stack.enter_context(start_nodes(len(num_cpus), shared=[tmp_path]))
            for node, number in zip(nodes, num_cpus, strict=True):
                node.env |= env(node.number)
                node.start_ray(head=nodes[0], num_cpus=number, timeout_s=400)
            return nodes

        yield start


def _start(node: Node, *args: str, prefix: Sequence[str] = (), **env: str) -> "subprocess.Popen[str]":
    command = (*prefix, sys.executable, "-m", "tidemill_trainer", *args)
    env = {"OMP_NUM_THREADS": "1", **env}
    return node.start(*command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=env)


def _wait_for(process: "subprocess.Popen[str]", pattern: str) -> str:
    """Return the output up to a line that matches."""
    assert process.stdout is not None
    output = ""
    for line in process.stdout:
        output += line
        if re.search(pattern, line):
            return output
    raise AssertionError(f"the command exited before it printed {pattern!r}:\n{output}")


def _finish(process: "subprocess.Popen[str]", status: int = 0, timeout_s: float = 1200) -> str:
    output, _ = process.communicate(timeout=timeout_s)
    assert process.returncode == status, output
    return output


def _train_here(*settings: str) -> None:
    here = [sys.executable, "-m", "tidemill_trainer", "demo", *settings]
    _finish(subprocess.Popen(here, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True))


def _nodes_of(run: Path, group: str) -> list[str]:
    """Return the Ray node of each process of a group that the run registered."""
    lines = [json.loads(line) for line in (run / "logs" / "processes.jsonl").read_text().splitlines()]
    return [line["node"] for line in lines if line["name"].startswith(group)]


def _without_times(step: dict) -> dict:
    return {name: value for name, value in step.items() if not name.startswith(TIMES)}


def _has(node: Node, title: str) -> bool:
    return title in node.run("ps", "-eo", "args")


def _assert_nothing_left(node: Node) -> None:
    assert "tidemill-run" not in node.run("ls", "/tmp", "/dev/shm")
    assert not _has(node, "sglang")


def _train_on_both(two: Sequence[Node], settings: Sequence[str], run: Path) -> dict[int, dict[str, Any]]:
    """Train four steps on two nodes, with a rank on each; return the metrics."""
    _finish(_start(two[0], "demo", *settings, *_ON_BOTH, f"trainer.run_dir={run.parent}", f"trainer.name={run.name}"))
    assert len(set(_nodes_of(run, "actor"))) == 2  # so each engine maps the memory of one rank, and not of the other
    steps = read_steps(run)
    assert [step["weight_update/verified"] for step in steps.values()] == [1.0] * 4
    for node in two:
        _assert_nothing_left(node)
    return steps


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="requires two GPUs")
def test_two_nodes_with_a_gpu_each_train_and_update_weights_over_the_network(cluster, tmp_path):
    log = str(tmp_path / "nccl.%h.%p")
    two = cluster(
        3, 2, env=lambda number: {"CUDA_VISIBLE_DEVICES": str(number), "NCCL_DEBUG_FILE": log, **_ONLY_SOCKETS}
    )
    _train_on_both(two, (*_SMALL, *_SHARED_GPU, "trainer.total_steps=4"), tmp_path / "two")
    connected = {file.name for file in tmp_path.glob("nccl.*") if "via NET/Socket" in file.read_text()}
    assert len(connected) == 4, connected  # two training ranks, and two engines, to which the weights are sent


def test_two_nodes_train_as_one_does_and_their_checkpoint_resumes_on_one(cluster, tmp_path):
    """The checkpoint is in an S3 store on the first node, as the nodes may share no folder for large files."""
    two = cluster(3, 2, env=lambda _: _STORE)  # exactly enough CPUs: an episode worker, 2 ranks and 2 engines
    two[0].start(sys.executable, "-m", "moto.server", "-H", "0.0.0.0", "-p", "5000", stderr=subprocess.DEVNULL)
    two[1].run(sys.executable, "-c", _MAKE_BUCKET, timeout_s=120)
    settings = (*_SMALL, f"trainer.run_dir={tmp_path}", "trainer.total_steps=4")
    run = tmp_path / "two"
    steps = _train_on_both(two, (*settings, "trainer.checkpoint_dir=s3://tests/runs"), run)
    assert not (run / "checkpoints").exists()

    _train_here(*settings, "trainer.name=one")
    expected = read_steps(tmp_path / "one")
    for step in expected:
        assert _without_times(steps[step]) == _without_times(expected[step])

    fewer = ("trainer.nnodes=1", "actor.num_workers=1", "rollout.num_engines=1", "trainer.total_steps=6")
    output = _finish(_start(two[1], "train", str(run / "config.toml"), "--resume", *fewer))
    assert "continuing after step 4 from s3://tests/runs/two/step_000004" in output.replace("\n", "")
    assert sorted(read_steps(run)) == [1, 2, 3, 4, 5, 6]


def test_three_nodes_train_as_one_does(cluster, tmp_path):
    three = cluster(2, 2, 2)
    settings = (*_SMALL, f"trainer.run_dir={tmp_path}", "trainer.total_steps=4", "actor.num_workers=3")
    where = ("trainer.ray_address=auto", "trainer.nnodes=3", "trainer.name=three")
    _finish(_start(three[0], "demo", *settings, *where))
    run = tmp_path / "three"
    assert len(set(_nodes_of(run, "actor"))) == 3
    assert len(set(_nodes_of(run, "rollout"))) == 2
    steps = read_steps(run)
    assert [step["weight_update/verified"] for step in steps.values()] == [1.0] * 4
    for node in three:
        _assert_nothing_left(node)

    _train_here(*settings, "trainer.name=one")
    expected = read_steps(tmp_path / "one")
    assert sorted(steps) == sorted(expected) == [1, 2, 3, 4]
    for step in expected:
        assert _without_times(steps[step]) == _without_times(expected[step])
    assert trained_problems(RunDir(run).ledger) == trained_problems(RunDir(tmp_path / "one").ledger)


def _link_down(node: Node) -> None:
    node.set_link(is_up=False)


@pytest.mark.parametrize(
    ("lose", "num_epochs"), [(Node.suspend, 1), (Node.stop, 1), (_link_down, 1), (_link_down, 100)]
)
def test_run_that_loses_the_node_of_a_training_rank_names_it(
    cluster, tmp_path, lose: Callable[[Node], object], num_epochs: int
):
    """At some moment of short steps, or with many epochs during the first update."""
    two = cluster(3, 2)
    settings = (*_SMALL, f"trainer.run_dir={tmp_path}", "trainer.total_steps=1000", "trainer.name=lost")
    process = _start(two[0], "demo", *settings, *_ON_BOTH, f"actor.ppo_epochs={num_epochs}")
    _wait_for(process, r"sft +20 ")
    time.sleep(20)
    lose(two[1])
    output = _finish(process, status=1, timeout_s=120)
    assert re.search(r"error: rank 1 of group 'actor' \(.*node1", output), output
    _assert_nothing_left(two[0])


def test_run_that_loses_a_node_continues_on_the_others(cluster, tmp_path):
    """Two of three nodes have a training rank. One of these hangs, and the rank starts again on the third node."""
    three = cluster(3, 3, 3)
    settings = (*_SMALL, f"trainer.run_dir={tmp_path}", "trainer.total_steps=12", "trainer.name=lost")
    process = _start(three[0], "demo", *settings, *_ON_BOTH, "trainer.max_restarts=1", "trainer.save_freq=1")
    _wait_for(process, r"rl +3 ")
    lost = next(node for node in three[1:] if _has(node, "ray::ActorWorker"))
    lost.suspend()
    output = _finish(process, timeout_s=600)
    assert re.search(rf"rank [01] of group 'actor' \({lost.name}.* died .* the run continues after step", output), (
        output
    )
    run = tmp_path / "lost"
    assert sorted(read_steps(run)) == list(range(1, 13))
    assert set(trained_problems(RunDir(run).ledger).values()) == {4}
    for node in three:
        if node is not lost:
            _assert_nothing_left(node)


def test_folder_of_ray_that_belongs_to_another_user_is_named_with_the_remedy(tmp_path):
    # root without the rights to write into, and to change the mode of, folders of other users
    as_user = ("setpriv", "--inh-caps=-all", "--bounding-set=-dac_override,-fowner")
    settings = (*_SMALL, "rollout.num_engines=1", "trainer.total_steps=1", f"trainer.run_dir={tmp_path}")
    with start_nodes(1, shared=[tmp_path]) as [node]:
        node.run("install", "-d", "-o", "65534", "-m", "755", "/tmp/ray")
        output = _finish(_start(node, "demo", *settings, "trainer.name=refused", prefix=as_user), status=1)
        message = r"error: cannot start Ray, because it cannot write /tmp/ray/\S+: .* set the .* RAY_TMPDIR"
        assert re.search(message, output), output
        elsewhere = {"RAY_TMPDIR": "/tmp/mine"}
        node.run("mkdir", elsewhere["RAY_TMPDIR"])
        _finish(_start(node, "demo", *settings, "trainer.name=elsewhere", prefix=as_user, **elsewhere))
    assert sorted(read_steps(tmp_path / "elsewhere")) == [1]


def test_run_continues_on_the_remaining_node_when_the_other_one_disappears(cluster, tmp_path):
    nodes = cluster(3, 2)  # exactly enough: an episode worker, 2 ranks and 2 engines
    settings = (*_SMALL, f"trainer.run_dir={tmp_path}", "trainer.total_steps=12", "trainer.max_restarts=1")
    process = _start(nodes[0], "demo", *settings, *_ON_BOTH, "trainer.name=lost")
    before = _wait_for(process, r"rl +3 ")
    nodes[1].stop()  # with one of two training ranks and one of two engines
    output = before + _finish(process, timeout_s=600)
    assert re.search(r"rank 1 of group 'actor' .* Restart 1 of at most 1 .* the run continues after step [24]", output)
    assert (
        "the cluster has fewer nodes; the run continues with trainer.nnodes=1 (before: 2), actor.num_workers=1 "
        "(before: 2), rollout.num_engines=1 (before: 2)"
    ) in output
    steps = read_steps(tmp_path / "lost")
    assert sorted(steps) == list(range(1, 13))
    assert [step["rollout/num_engines"] for step in steps.values()].count(1) >= 8
    assert steps[12]["weight_update/version"] == 12
    assert steps[12]["ledger/episodes/trained"] == 12 * 16 * 4
    assert steps[12]["ledger/episodes/in_flight"] == 0
    _assert_nothing_left(nodes[0])
