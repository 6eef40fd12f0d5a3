"""Workers that raise, hang or die: the error on the driver, and the shutdown of all processes."""

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
from tidemill_dispatch.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup, dead_workers  # noqa: E402
from tidemill_dispatch.ray.failure import Failure  # noqa: E402

pytestmark = pytest.mark.ray
cloudpickle.register_pickle_by_value(sys.modules[__name__])


class FailingWorker(Worker):
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

        if self.rank == 1:  # a child process kills the worker, like SGLang's watchdog
            subprocess.Popen(["sh", "-c", f"sleep 0.2; kill -9 {os.getpid()}"])
            time.sleep(1000)
        dist.all_reduce(torch.ones(1))

    @register(Dispatch.ONE_TO_ALL)
    def both_raise(self):
        import torch.distributed as dist

        dist.barrier()  # a call may reach one rank later than the other
        time.sleep(0.0 if self.rank == 1 else 0.3)
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
    def exit_rank_one(self):
        if self.rank == 1:
            sys.exit(3)


def start(*args, timeout_s=60.0, **kwargs):
    pool = RayResourcePool(process_on_nodes=[2])
    init = RayClassWithInitArgs(FailingWorker, *args, **kwargs)
    return RayWorkerGroup(pool, init, name_prefix="failing", timeout_s=timeout_s)


def alive(pids):
    return [pid for pid in pids if os.path.exists(f"/proc/{pid}")]


def becomes_true(condition, timeout_s=20):
    """Whether `condition` holds within the time; Ray ends processes only after it answered."""
    deadline = time.monotonic() + timeout_s
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)
    return condition()


def have_exited(pids):
    return becomes_true(lambda: not alive(pids))


def cpus_are_free():
    return becomes_true(lambda: ray.available_resources().get("CPU") == ray.cluster_resources()["CPU"])


@pytest.fixture
def group(ray_cluster):
    with start() as group:
        yield group


@pytest.fixture(scope="class")
def collective_group(ray_cluster):
    with start() as group:
        group.init_process_group()
        yield group


class TestCollectives:
    """Tests that share a group with a gloo process group; each leaves it in a state in which the later ones work."""

    def test_first_of_several_errors_is_raised_and_others_are_listed(self, collective_group):
        with pytest.raises(WorkerError) as caught:
            collective_group.both_raise()
        assert caught.value.rank == 1
        assert caught.value.other_errors == ("rank 0: RuntimeError: rank 0",)
        assert caught.value.still_running == ()

    def test_error_of_one_rank_is_raised_while_its_peer_hangs_in_a_collective(self, collective_group):
        with pytest.raises(WorkerError) as caught:
            collective_group.rank_one_raises()
        error = caught.value
        assert (error.group, error.rank, error.method) == ("failing", 1, "rank_one_raises")
        assert (error.error_type, error.error_message, error.still_running) == (
            "ValueError",
            "row 3 has 900 tokens",
            (0,),
        )
        assert re.fullmatch(r"\S+:\d+", error.host)
        assert 'raise ValueError("row 3 has 900 tokens")' in error.remote_traceback
        assert "ValueError on rank 1 of group 'failing'" in str(error)

    def test_killed_rank_is_the_error_rather_than_the_failed_collective_of_its_peer(self, collective_group):
        with pytest.raises(WorkerDiedError) as caught:
            collective_group.rank_one_is_killed()
        error = caught.value
        assert (error.group, error.rank, error.method) == ("failing", 1, "rank_one_is_killed")
        assert "rank 1 of group 'failing' (" in str(error)
        with pytest.raises(WorkerDiedError):  # a group with a dead rank refuses calls
            collective_group.both_raise()


def test_worker_that_exits_has_died(group):
    with pytest.raises(WorkerDiedError, match="rank 1 of group 'failing'"):
        group.exit_rank_one()


def test_dead_rank_fails_a_call_of_other_ranks(group):
    pids = [row[0] for row in group.start_children()]
    os.kill(pids[1], signal.SIGKILL)
    with pytest.raises(WorkerDiedError, match="rank 1 of group 'failing'"):
        group.rank_zero_hangs()


def test_check_alive_and_all_pending_calls_notice_a_death_and_accept_busy_ranks(group):
    first, second = group.start_children()
    group.check_alive()
    futures = [group.hang(), group.hang()]
    group.check_alive(timeout_s=0.2)  # busy ranks are alive
    os.kill(first[0], signal.SIGKILL)
    with pytest.raises(WorkerDiedError, match="rank 0 of group 'failing'"):
        group.check_alive(timeout_s=30)
    for future in futures:
        with pytest.raises(WorkerDiedError, match="rank 0 of group 'failing'"):
            future.get(timeout_s=30)
    assert have_exited(first)  # the worker and its children
    assert alive(second) == second


def test_shutdown_kills_busy_workers_and_children_and_frees_resources(ray_cluster):
    group = start()
    pids = [pid for row in group.start_children() for pid in row]
    group.hang()
    assert alive(pids) == pids
    group.shutdown()
    assert alive(pids) == []
    group.shutdown()
    with pytest.raises(RuntimeError, match="group 'failing' was shut down"):
        group.both_raise()
    assert cpus_are_free()


def test_shutdown_kills_all_others_when_one_kill_fails(ray_cluster):
    group = start()
    pids = [pid for row in group.start_children() for pid in row]
    group.workers.insert(1, "not an actor")
    with pytest.raises(ValueError, match=r"ray.kill\(\) only supported for actors"):
        group.shutdown()
    assert have_exited(pids)
    assert cpus_are_free()
    group.shutdown()


def test_group_from_before_a_new_connection_to_ray_is_shut_down(ray_cluster):
    group = start()
    ray.shutdown()
    ray.init(address=ray_cluster.address, namespace="tests", log_to_driver=False, logging_level="ERROR")
    group.shutdown()
    group.shutdown()
    assert cpus_are_free()


class InterruptedWorker(Worker):
    def __init__(self, error=None):
        if error is not None:
            raise error

    @register(Dispatch.ONE_TO_ALL)
    def interrupt(self):
        raise KeyboardInterrupt("by a library")


def test_interrupt_on_a_worker_is_named_with_its_traceback(ray_cluster):
    def run(*args):
        pool, init = RayResourcePool([1]), RayClassWithInitArgs(InterruptedWorker, *args)
        with RayWorkerGroup(pool, init, name_prefix="interrupted") as group:
            group.interrupt()

    for args, method in [((), "interrupt"), ((KeyboardInterrupt("by a library"),), "__init__")]:
        with pytest.raises(WorkerError) as caught:
            run(*args)
        assert (caught.value.method, caught.value.error_type) == (method, "KeyboardInterrupt")
        assert caught.value.error_message == "by a library"
        assert f"in {method}" in caught.value.remote_traceback


class UndescribedWorker(Worker):
    def tidemill_describe(self):
        """Override the actor's own method, so that no rank reports its host."""


def test_ranks_that_report_no_host_are_killed(ray_cluster):
    with pytest.raises(WorkerError, match="the worker was not constructed"):
        RayWorkerGroup(
            RayResourcePool([2]), RayClassWithInitArgs(UndescribedWorker), name_prefix="undescribed", lifetime="named"
        )
    assert becomes_true(lambda: ray.util.list_named_actors() == [])
    assert cpus_are_free()


def test_error_of_constructor_is_a_worker_error_with_traceback(ray_cluster):
    with pytest.raises(WorkerError) as caught:
        start(fail_on=1)
    assert (caught.value.rank, caught.value.method, caught.value.error_type) == (1, "__init__", "FileNotFoundError")
    assert "in __init__" in caught.value.remote_traceback


def test_hanging_constructor_times_out(ray_cluster):
    with pytest.raises(CallTimeoutError, match="'__init__' of group 'failing'"):
        start(hang=True, timeout_s=1.0)


def test_start_without_blocking_raises_constructor_errors_at_the_first_call(ray_cluster):
    init = RayClassWithInitArgs(FailingWorker, fail_on=0)
    group = RayWorkerGroup(RayResourcePool(process_on_nodes=[2]), init, name_prefix="later", blocking=False)
    with group, pytest.raises(WorkerError, match=r"rank 0 of group 'later' .* in '__init__': no checkpoint"):
        group.start_children()


def test_check_alive_accepts_running_constructors(ray_cluster):
    init = RayClassWithInitArgs(FailingWorker, hang=True)
    with RayWorkerGroup(RayResourcePool([2]), init, name_prefix="slow", blocking=False, timeout_s=30) as group:
        group.check_alive(timeout_s=0.3)


def test_missing_resources_are_named_with_those_of_the_cluster(ray_cluster):
    pool = RayResourcePool(process_on_nodes=[1, 99], placement_timeout_s=0.5)
    message = r"group 'big' requires 1 \+ 99 processes \(by node\) with {'CPU': 1.0} each, .* has {'CPU': 3.0}"
    with pytest.raises(RuntimeError, match=message):
        RayWorkerGroup(pool, RayClassWithInitArgs(FailingWorker), name_prefix="big")


class UnprintableError(Exception):
    def __str__(self):
        raise RuntimeError("no text")


def test_exception_whose_text_cannot_be_made_is_named():
    failure = Failure.from_exception(UnprintableError())
    assert failure.error_type.endswith(".UnprintableError")
    assert failure.error_message == "(its __str__ raised RuntimeError)"


class ClashingWorker(Worker):
    @register(Dispatch.ONE_TO_ALL)
    def shutdown(self): ...


def test_wrong_group_arguments_are_refused(ray_cluster):
    pool = RayResourcePool(process_on_nodes=[2])
    with pytest.raises(
        TypeError, match=r"subclass of tidemill_dispatch.Worker \(the plain class, without ray.remote\)"
    ):
        RayClassWithInitArgs(ray.remote(FailingWorker))
    message = r"FailingWorker\(.*\) cannot be called with these arguments: .*unexpected keyword argument 'fail_at'"
    with pytest.raises(TypeError, match=message):
        RayClassWithInitArgs(FailingWorker, fail_at=1)
    with pytest.raises(ValueError, match=r"ClashingWorker registers \['shutdown'\], which are names of attributes"):
        RayWorkerGroup(pool, RayClassWithInitArgs(ClashingWorker), name_prefix="x")
    init = RayClassWithInitArgs(FailingWorker)
    for env, kind, message in [
        ({"RANK": "1"}, ValueError, r"must not contain \['RANK'\], which the group sets"),
        ({"LD_PRELOAD": "x"}, ValueError, r"must not contain \['LD_PRELOAD'\], which are read when a process starts"),
        ({"OMP_NUM_THREADS": 1}, TypeError, "must map str to str"),
    ]:
        with pytest.raises(kind, match=message):
            RayWorkerGroup(pool, init, name_prefix="x", env_vars=env)


class CountingWorker(Worker):
    def __init__(self, start):
        self.count = start

    @register(Dispatch.ONE_TO_ALL)
    def add(self):
        self.count += 1
        return os.getpid(), self.rank, self.count


def test_dead_rank_is_restarted_with_its_arguments_while_the_others_keep_their_state(ray_cluster):
    pool = RayResourcePool(process_on_nodes=[2])
    with RayWorkerGroup(pool, RayClassWithInitArgs(CountingWorker, 7), name_prefix="counting") as group:
        pids = [pid for pid, _, _ in group.add()]
        assert group.dead_ranks() == []
        os.kill(pids[1], signal.SIGKILL)
        with pytest.raises(WorkerDiedError, match="rank 1"):
            group.add()
        assert group.dead_ranks() == [1]
        group.restart([1])
        (first, *of_first), (second, *of_second) = group.add()
        assert first == pids[0]
        assert second not in pids
        assert of_second == [1, 8]
        assert of_first == [0, 10]
        assert group.dead_ranks() == []


def test_dead_workers_of_several_groups_are_found_at_the_same_time(ray_cluster):
    pools, init = [RayResourcePool(process_on_nodes=[1]) for _ in "ab"], RayClassWithInitArgs(CountingWorker, 0)
    with RayWorkerGroup(pools[0], init, name_prefix="a") as a, RayWorkerGroup(pools[1], init, name_prefix="b") as b:
        workers = [*a.workers, *b.workers]
        assert dead_workers(workers) == []
        os.kill(b.add()[0][0], signal.SIGKILL)
        with pytest.raises(WorkerDiedError, match="rank 0"):
            b.add()
        assert dead_workers(workers) == [1]
    assert dead_workers([]) == []


def test_rank_of_another_drivers_group_cannot_be_restarted(ray_cluster):
    pool = RayResourcePool(process_on_nodes=[1])
    init = RayClassWithInitArgs(CountingWorker, 0)
    with RayWorkerGroup(pool, init, name_prefix="named-counting", lifetime="named") as group:
        group.add()
        with pytest.raises(RuntimeError, match="only be restarted by the driver that started the group"):
            RayWorkerGroup.from_detached("named-counting").restart([0])
        with pytest.raises(ValueError, match=r"ranks 0 to 0, got \[1\]"):
            group.restart([1])
