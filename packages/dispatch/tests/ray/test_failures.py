"""What happens when workers raise, hang or die, and that nothing is left of them."""

import os
import re
import signal
import subprocess
import sys
import time

import pytest
from tidemill_dispatch import CallTimeoutError, Dispatch, Worker, WorkerDiedError, WorkerError, register

ray = pytest.importorskip("ray")
from ray import cloudpickle  # noqa: E402
from tidemill_dispatch.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup  # noqa: E402

pytestmark = pytest.mark.ray
cloudpickle.register_pickle_by_value(sys.modules[__name__])


class BadLuckWorker(Worker):
    def __init__(self, fail_on=None, hang=False):
        if self.rank == fail_on:
            raise FileNotFoundError("no checkpoint at /nowhere")
        if hang:
            time.sleep(1000)

    @register(Dispatch.ONE_TO_ALL)
    def init_process_group(self):
        import torch.distributed as dist

        dist.init_process_group("gloo")
        dist.barrier()

    @register(Dispatch.ONE_TO_ALL)
    def rank_one_raises(self):
        import torch
        import torch.distributed as dist

        if self.rank == 1:
            raise ValueError("row 3 has 900 tokens")
        dist.all_reduce(torch.ones(1))

    @register(Dispatch.ONE_TO_ALL)
    def rank_one_is_killed(self):
        import torch
        import torch.distributed as dist

        if self.rank == 1:  # as SGLang's watchdog does: a child of the worker kills it
            subprocess.Popen(["sh", "-c", f"sleep 0.2; kill -9 {os.getpid()}"])
            time.sleep(1000)
        dist.all_reduce(torch.ones(1))

    @register(Dispatch.ONE_TO_ALL)
    def both_raise(self):
        time.sleep(0.0 if self.rank == 1 else 0.4)
        raise RuntimeError(f"rank {self.rank}")

    @register(Dispatch.ONE_TO_ALL)
    def start_children(self):
        child = subprocess.Popen(["sleep", "1000"]).pid
        grandchild = int(subprocess.check_output("sleep 1000 >/dev/null 2>&1 & echo $!", shell=True))
        return [os.getpid(), child, grandchild]

    @register(Dispatch.ONE_TO_ALL, blocking=False)
    def hang(self):
        time.sleep(1000)

    @register(Dispatch.RANK_ZERO)
    def rank_zero_hangs(self):
        time.sleep(1000)

    @register(Dispatch.ONE_TO_ALL)
    def leave(self):
        if self.rank == 1:
            sys.exit(3)


def start(*args, timeout_s=60.0, **kwargs):
    pool = RayResourcePool(process_on_nodes=[2])
    init = RayClassWithInitArgs(BadLuckWorker, *args, **kwargs)
    return RayWorkerGroup(pool, init, name_prefix="unlucky", timeout_s=timeout_s)


def alive(pids):
    return [pid for pid in pids if os.path.exists(f"/proc/{pid}")]


def wait_gone(pids, seconds):
    deadline = time.monotonic() + seconds
    while alive(pids) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not alive(pids)


def cpus_are_free():
    deadline = time.monotonic() + 10
    while ray.available_resources().get("CPU") != ray.cluster_resources()["CPU"] and time.monotonic() < deadline:
        time.sleep(0.1)
    return ray.available_resources()["CPU"] == ray.cluster_resources()["CPU"]


@pytest.fixture
def group(cluster):
    with start() as group:
        yield group


def test_one_rank_raises_while_the_other_hangs_in_a_collective(group):
    group.init_process_group()
    started = time.monotonic()
    with pytest.raises(WorkerError) as caught:
        group.rank_one_raises()
    assert time.monotonic() - started < 3
    error = caught.value
    assert (error.group, error.rank, error.method) == ("unlucky", 1, "rank_one_raises")
    assert (error.error_type, error.error_message, error.still_running) == ("ValueError", "row 3 has 900 tokens", (0,))
    assert re.fullmatch(r"\S+:\d+", error.host)
    assert 'raise ValueError("row 3 has 900 tokens")' in error.remote_traceback
    assert "ValueError on rank 1 of group 'unlucky'" in str(error)
    started = time.monotonic()
    group.shutdown()
    assert time.monotonic() - started < 8


def test_a_rank_that_is_killed_is_the_error_not_the_broken_collective_of_its_peer(group):
    group.init_process_group()
    started = time.monotonic()
    with pytest.raises(WorkerDiedError) as caught:
        group.rank_one_is_killed()
    assert time.monotonic() - started < 6
    error = caught.value
    assert (error.group, error.rank, error.method) == ("unlucky", 1, "rank_one_is_killed")
    assert "rank 1 of group 'unlucky' (" in str(error)
    with pytest.raises(WorkerDiedError):  # no rank is called in a group that has lost one
        group.both_raise()


def test_the_first_of_several_errors_is_raised_and_the_others_are_listed(group):
    with pytest.raises(WorkerError) as caught:
        group.both_raise()
    assert caught.value.rank == 1
    assert caught.value.other_errors == ("rank 0: RuntimeError: rank 0",)
    assert caught.value.still_running == ()


def test_a_worker_that_exits_died(group):
    with pytest.raises(WorkerDiedError, match="rank 1 of group 'unlucky'"):
        group.leave()


def test_a_dead_rank_fails_a_call_that_leaves_it_out(group):
    pids = [row[0] for row in group.start_children()]
    os.kill(pids[1], signal.SIGKILL)
    started = time.monotonic()
    with pytest.raises(WorkerDiedError, match="rank 1 of group 'unlucky'"):
        group.rank_zero_hangs()
    assert time.monotonic() - started < 10


def test_a_death_between_calls_is_noticed_by_who_asks(group):
    pids = [row[0] for row in group.start_children()]
    group.check_alive()
    busy = group.hang()
    started = time.monotonic()
    group.check_alive(timeout_s=0.5)  # busy is alive
    assert time.monotonic() - started < 2
    os.kill(pids[1], signal.SIGKILL)
    with pytest.raises(WorkerDiedError, match="rank 1 of group 'unlucky'"):
        group.check_alive(timeout_s=10)
    assert time.monotonic() - started < 10
    with pytest.raises(WorkerDiedError, match="rank 1 of group 'unlucky'"):
        busy.get()


def test_every_pending_call_fails_and_children_of_a_killed_worker_end(group):
    first, second = group.start_children()
    futures = [group.hang(), group.hang()]
    os.kill(first[0], signal.SIGKILL)
    for future in futures:
        with pytest.raises(WorkerDiedError, match="rank 0 of group 'unlucky'"):
            future.get(timeout_s=10)
    assert wait_gone(first, 10)
    assert alive(second) == second


def test_shutdown_ends_busy_workers_and_their_children_and_frees_the_resources(cluster):
    group = start()
    pids = [pid for row in group.start_children() for pid in row]
    group.hang()
    assert alive(pids) == pids
    group.shutdown()
    assert alive(pids) == []
    group.shutdown()
    with pytest.raises(RuntimeError, match="group 'unlucky' was shut down"):
        group.both_raise()
    assert cpus_are_free()


def test_what_cannot_be_killed_keeps_nothing_else_alive(cluster):
    group = start()
    pids = [pid for row in group.start_children() for pid in row]
    group.workers.insert(1, "not an actor")
    with pytest.raises(ValueError, match=r"ray.kill\(\) only supported for actors"):
        group.shutdown()
    assert wait_gone(pids, 10)
    assert cpus_are_free()
    group.shutdown()


class ShyWorker(Worker):
    def tidemill_describe(self):
        """Takes the place of the actor's own method, so that no rank says where it is."""


def test_ranks_that_cannot_tell_where_they_are_end(cluster):
    with pytest.raises(WorkerError, match="the worker was not constructed"):
        RayWorkerGroup(RayResourcePool([2]), RayClassWithInitArgs(ShyWorker), name_prefix="shy", lifetime="named")
    assert ray.util.list_named_actors() == []
    assert cpus_are_free()


def test_an_error_of_a_constructor_is_a_worker_error_with_its_traceback(cluster):
    with pytest.raises(WorkerError) as caught:
        start(fail_on=1)
    assert (caught.value.rank, caught.value.method, caught.value.error_type) == (1, "__init__", "FileNotFoundError")
    assert "in __init__" in caught.value.remote_traceback


def test_a_constructor_that_hangs_meets_the_deadline_and_a_start_without_waiting_raises_at_the_first_call(cluster):
    started = time.monotonic()
    with pytest.raises(CallTimeoutError, match="'__init__' of group 'unlucky'"):
        start(hang=True, timeout_s=3.0)
    assert time.monotonic() - started < 15
    init = RayClassWithInitArgs(BadLuckWorker, fail_on=0)
    group = RayWorkerGroup(RayResourcePool(process_on_nodes=[2]), init, name_prefix="later", blocking=False)
    with group, pytest.raises(WorkerError, match=r"rank 0 of group 'later' .* in '__init__': no checkpoint"):
        group.start_children()


def test_a_group_whose_constructors_go_on_is_looked_at_for_as_long_as_asked(cluster):
    init = RayClassWithInitArgs(BadLuckWorker, hang=True)
    with RayWorkerGroup(RayResourcePool([2]), init, name_prefix="slow", blocking=False, timeout_s=30) as group:
        started = time.monotonic()
        group.check_alive(timeout_s=0.5)
        assert 0.4 < time.monotonic() - started < 3


def test_resources_that_are_not_there(cluster):
    pool = RayResourcePool(process_on_nodes=[1, 99], placement_timeout_s=0.5)
    message = r"group 'big' needs 1 \+ 99 processes \(by node\) of {'CPU': 1.0} each; .* has {'CPU': 3.0}"
    with pytest.raises(RuntimeError, match=message):
        RayWorkerGroup(pool, RayClassWithInitArgs(BadLuckWorker), name_prefix="big")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"process_on_nodes": []}, "at least 1 for each node, got"),
        ({"process_on_nodes": [2, 0]}, r"at least 1 for each node, got \[2, 0\]"),
        ({"process_on_nodes": [1], "num_cpus_per_worker": -1}, "must be 0 or more, got num_cpus_per_worker=-1"),
        ({"process_on_nodes": [1], "num_cpus_per_worker": 0}, "needs some num_cpus_per_worker or num_gpus_per_worker"),
    ],
)
def test_wrong_pools(arguments, message):
    with pytest.raises(ValueError, match=message):
        RayResourcePool(**arguments)


class ClashingWorker(Worker):
    @register(Dispatch.ONE_TO_ALL)
    def shutdown(self): ...


def test_wrong_groups(cluster):
    pool = RayResourcePool(process_on_nodes=[2])
    with pytest.raises(
        TypeError, match=r"subclass of tidemill_dispatch.Worker \(the plain class, without ray.remote\)"
    ):
        RayClassWithInitArgs(ray.remote(BadLuckWorker))
    message = r"BadLuckWorker\(.*\) cannot be called with these arguments: .*unexpected keyword argument 'fail_at'"
    with pytest.raises(TypeError, match=message):
        RayClassWithInitArgs(BadLuckWorker, fail_at=1)
    with pytest.raises(TypeError, match=r"list with a count for each node, got 2; write \[2\]"):
        RayResourcePool(2)
    with pytest.raises(ValueError, match=r"ClashingWorker registers \['shutdown'\], which a worker group has itself"):
        RayWorkerGroup(pool, RayClassWithInitArgs(ClashingWorker), name_prefix="x")
    init = RayClassWithInitArgs(BadLuckWorker)
    for env, kind, message in [
        ({"RANK": "1"}, ValueError, r"may not hold \['RANK'\]: the group sets them"),
        ({"LD_PRELOAD": "x"}, ValueError, r"may not hold \['LD_PRELOAD'\]: they are read when a process starts"),
        ({"OMP_NUM_THREADS": 1}, TypeError, "must map str to str"),
    ]:
        with pytest.raises(kind, match=message):
            RayWorkerGroup(pool, init, name_prefix="x", env_vars=env)
