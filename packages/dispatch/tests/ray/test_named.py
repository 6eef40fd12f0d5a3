"""Named and detached groups, from the driver that started them and from others."""

import os
import subprocess
import sys
import time

import pytest
from tidemill_dispatch import Dispatch, ListBatch, Worker, register

ray = pytest.importorskip("ray")
from ray import cloudpickle  # noqa: E402
from tidemill_dispatch.ray import (  # noqa: E402
    RayClassWithInitArgs,
    RayResourcePool,
    RayWorkerGroup,
    create_colocated_worker_cls,
    split_resource_pool,
)

pytestmark = pytest.mark.ray
cloudpickle.register_pickle_by_value(sys.modules[__name__])
# A driver in a process of its own. The worker class is in its main module, which other drivers cannot import.
STARTER = """
import sys
import ray
from tidemill_dispatch import Dispatch, ListBatch, Worker, split_over, register
from tidemill_dispatch.ray import (
    RayClassWithInitArgs, RayResourcePool, RayWorkerGroup, create_colocated_worker_cls
)

class Counter(Worker):
    def __init__(self, start):
        self.count = start
        self.register_dispatch_collect_info("all", 1 - self.rank, True)

    @register(split_over("all"))
    def add(self, batch):
        self.count += len(batch)
        return batch

    @register(Dispatch.ONE_TO_ALL)
    def counts(self):
        return self.count

ray.init(address=sys.argv[1], namespace="tests", log_to_driver=False, logging_level="ERROR")
init = RayClassWithInitArgs(Counter, 10)
for name, classes, lifetime in [
    ("lasting", init, "detached"), ("passing", init, "named"),
    ("roles", create_colocated_worker_cls({"a": init, "b": RayClassWithInitArgs(Counter, 20)}), "detached"),
]:
    pool = RayResourcePool([2], num_cpus_per_worker=0.25)
    group = RayWorkerGroup(pool, classes, name_prefix=name, lifetime=lifetime, timeout_s=60)
    assert name != "lasting" or group.add(ListBatch([1, 2, 3])).items == [1, 2, 3]
print("started", flush=True)
sys.stdin.readline()
"""


def wait_for(condition, seconds=20.0):
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.1)
    return condition()


def free_cpus():
    return ray.available_resources().get("CPU", 0)


@pytest.fixture(scope="module")
def starter(ray_cluster):
    command = [sys.executable, "-c", STARTER, ray.get_runtime_context().gcs_address]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        assert process.stdout.readline().strip() == "started"
        yield process
    finally:
        process.kill()
        process.wait()


def test_groups_of_another_driver_can_be_called_and_shut_down(starter):
    passing = RayWorkerGroup.from_detached("passing")
    assert passing.counts() == [10, 10]
    lasting = RayWorkerGroup.from_detached("lasting")
    assert lasting.counts() == [11, 12]  # dp rank 0 is rank 1 and has two of three rows

    assert starter.communicate("\n")[0] == ""
    assert starter.returncode == 0
    assert wait_for(lambda: [n for n in ray.util.list_named_actors() if n.startswith("passing")] == [])
    with pytest.raises(ValueError, match=r"no group 'passing' in Ray namespace 'tests', .* \['lasting', 'roles'\]"):
        RayWorkerGroup.from_detached("passing")

    again = RayWorkerGroup.from_detached("lasting")  # its first driver has exited
    assert again.add(ListBatch(list(range(5)))).items == list(range(5))
    assert lasting.counts() == [13, 15]
    assert again.dp_size("all") == 2

    roles = RayWorkerGroup.from_detached("roles").spawn()
    assert (roles["a"].counts(), roles["b"].counts()) == ([10, 10], [20, 20])

    assert wait_for(lambda: free_cpus() == 2.0)
    again.shutdown()
    assert wait_for(lambda: free_cpus() == 2.5)
    roles["a"].shutdown()
    assert wait_for(lambda: free_cpus() == 3.0)
    assert wait_for(lambda: ray.util.list_named_actors() == [])


def test_duplicate_names_and_shared_pools_of_detached_groups_are_refused(starter):
    init = RayClassWithInitArgs(Worker)
    pool = RayResourcePool([2], num_cpus_per_worker=0.5, max_colocate_count=2)
    with RayWorkerGroup(pool, init, name_prefix="one", lifetime="named"):
        with pytest.raises(ValueError, match="a group named 'one' exists; connect to it with from_detached"):
            RayWorkerGroup(RayResourcePool([1], num_cpus_per_worker=0.5), init, name_prefix="one", lifetime="named")
        with pytest.raises(RuntimeError, match=r"group 'two' would share a pool, .* \(groups in it: \['one'\]\)"):
            RayWorkerGroup(pool, init, name_prefix="two", lifetime="detached")
    with pytest.raises(RuntimeError, match="requires a whole pool of its own"):
        RayWorkerGroup(split_resource_pool(pool, 1)[0], init, name_prefix="two", lifetime="detached")
    with pytest.raises(ValueError, match="lifetime must be None, 'named' or 'detached', got 'forever'"):
        RayWorkerGroup(pool, create_colocated_worker_cls({"x": init}), name_prefix="x", lifetime="forever")


class Sleeper(Worker):
    @register(Dispatch.ONE_TO_ALL)
    def pid(self):
        return os.getpid()

    @register(Dispatch.ALL_TO_ALL, blocking=False)
    def sleep(self, seconds):
        time.sleep(seconds)


def start_sleepers():
    pool = RayResourcePool([1, 1], num_cpus_per_worker=0.25)
    return RayWorkerGroup(pool, RayClassWithInitArgs(Sleeper), name_prefix="sleepers", lifetime="detached")


@pytest.mark.parametrize("rank", [0, 1])
def test_group_with_busy_ranks_times_out_and_can_be_stopped_by_name(ray_cluster, rank):
    group = start_sleepers()
    pids, free = group.pid(), free_cpus()
    group.sleep([1000 * (rank == 0), 1000 * (rank == 1)])
    with pytest.raises(TimeoutError, match=rf"ranks \[{rank}\] of group 'sleepers' did not answer within 0.5 s"):
        RayWorkerGroup.from_detached("sleepers", timeout_s=0.5)
    RayWorkerGroup.shutdown_detached("sleepers")
    assert wait_for(lambda: not [pid for pid in pids if os.path.exists(f"/proc/{pid}")])
    assert wait_for(lambda: free_cpus() == free + 0.5)
    group.shutdown()
    with start_sleepers() as again:  # the name is free
        assert set(again.pid()).isdisjoint(pids)
    with pytest.raises(ValueError, match="no group 'sleepers' in Ray namespace 'tests'"):
        RayWorkerGroup.shutdown_detached("sleepers")


@pytest.mark.parametrize("lost", [[0], [1], [0, 1]])
def test_group_with_dead_ranks_keeps_its_name_and_can_be_stopped_by_name(ray_cluster, lost):
    group, free = start_sleepers(), free_cpus()
    for rank in lost:
        ray.kill(group.workers[rank])
    left = [rank for rank in (0, 1) if rank not in lost]
    with pytest.raises(ValueError if lost == [0, 1] else RuntimeError) as caught:
        RayWorkerGroup.from_detached("sleepers")
    message = f"is not complete: only ranks {left} are alive" if left else "no group 'sleepers'"
    assert message in str(caught.value)
    with pytest.raises(ValueError, match="a group named 'sleepers' exists"):
        start_sleepers()
    RayWorkerGroup.shutdown_detached("sleepers")
    assert wait_for(lambda: free_cpus() == free + 0.5)


DISCONNECTED = """
import sys
import ray
from tidemill_dispatch.ray import RayWorkerGroup

ray.init(address=sys.argv[1], namespace="tests", log_to_driver=False, logging_level="ERROR")
group = RayWorkerGroup.from_detached("sleepers")
ray.shutdown()
group.shutdown()
print(ray.is_initialized())
"""


def test_shutdown_after_ray_shutdown_starts_no_cluster(ray_cluster):
    with start_sleepers() as group:
        command = [sys.executable, "-c", DISCONNECTED, ray.get_runtime_context().gcs_address]
        assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "False\n"
        assert len(group.pid()) == 2
