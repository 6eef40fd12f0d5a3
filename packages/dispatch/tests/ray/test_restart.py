"""Restart of a group's processes: what becomes of futures from before, and of a group that was shut down."""

import os
import signal
import sys
import time

import pytest
from tidemill_dispatch import Dispatch, Worker, WorkerDiedError, WorkerError, register

ray = pytest.importorskip("ray")
from ray import cloudpickle  # noqa: E402
from tidemill_dispatch.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup  # noqa: E402

pytestmark = pytest.mark.ray
cloudpickle.register_pickle_by_value(sys.modules[__name__])


class Sleeper(Worker):
    @register(Dispatch.ONE_TO_ALL)
    def pid(self):
        return os.getpid()

    @register(Dispatch.ONE_TO_ALL, blocking=False)
    def rank_one_sleeps(self):
        if self.rank == 1:
            time.sleep(1000)

    @register(Dispatch.RANK_ZERO, blocking=False)
    def rank_zero_sleeps(self, seconds):
        time.sleep(seconds)
        return self.rank


@pytest.fixture
def group(ray_cluster):
    pool = RayResourcePool(process_on_nodes=[2])
    with RayWorkerGroup(pool, RayClassWithInitArgs(Sleeper), name_prefix="sleepers", timeout_s=60) as group:
        yield group


def test_future_from_before_a_restart_raises_and_leaves_the_new_processes_usable(group):
    old = group.pid()
    polled, got = group.rank_one_sleeps(), group.rank_one_sleeps()
    os.kill(old[1], signal.SIGKILL)
    while group.dead_ranks() != [1]:
        time.sleep(0.05)
    group.restart([1])
    new = group.pid()
    assert polled.done()
    for future in (got, polled):
        with pytest.raises(
            WorkerDiedError, match=rf"rank 1 of group 'sleepers' \(\S+:{old[1]}\) died during 'rank_one_sleeps'"
        ):
            future.get(timeout_s=30)
    group.check_alive()
    assert group.dead_ranks() == []
    assert group.pid() == new


def test_call_of_another_rank_runs_through_a_restart(group):
    future = group.rank_zero_sleeps(5)  # longer than the interval of the checks of the rank that is not called
    group.restart([1])
    assert future.get(timeout_s=30) == 0


def test_death_after_a_restart_is_noticed(group):
    group.restart([0])
    os.kill(group.pid()[0], signal.SIGKILL)
    with pytest.raises(WorkerDiedError, match="rank 0"):
        group.pid()
    with pytest.raises(WorkerDiedError, match="rank 0"):
        group.rank_one_sleeps()


def test_restart_of_a_repeated_rank_is_refused(group):
    pids = group.pid()
    with pytest.raises(ValueError, match=r"restart requires each rank once, got \[1, 1\]"):
        group.restart([1, 1])
    assert group.pid() == pids


def test_group_that_was_shut_down_cannot_be_restarted(group):
    group.shutdown()
    workers = list(group.workers)
    with pytest.raises(RuntimeError, match="group 'sleepers' was shut down; start a new one"):
        group.restart([0])
    assert group.workers == workers


class FailsLater(Worker):
    def __init__(self, path):
        super().__init__()
        if self.rank == 1 and os.path.exists(path):
            raise KeyError("no weights")

    @register(Dispatch.RANK_ZERO)
    def pid(self):
        return os.getpid()


def test_constructors_of_two_restarts_are_both_waited_for(ray_cluster, tmp_path):
    pool = RayResourcePool(process_on_nodes=[2])
    path = tmp_path / "fails"
    with RayWorkerGroup(pool, RayClassWithInitArgs(FailsLater, str(path)), name_prefix="later", timeout_s=60) as group:
        group.pid()
        path.touch()
        group.restart([1])
        group.restart([0])
        with pytest.raises(WorkerError, match=r"rank 1.*no weights"):
            group.pid()
