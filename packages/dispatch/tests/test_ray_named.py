"""Groups that are found by name, by this driver and by one that came later."""

import subprocess
import sys
import time

import pytest
from tidemill_dispatch import ListBatch, Worker

ray = pytest.importorskip("ray")
from tidemill_dispatch.ray import (  # noqa: E402
    RayClassWithInitArgs,
    RayResourcePool,
    RayWorkerGroup,
    create_colocated_worker_cls,
    split_resource_pool,
)

pytestmark = pytest.mark.ray
# A driver of its own. The class is in its main module, which those who find the group cannot import.
MAKER = """
import sys
import ray
from tidemill_dispatch import Dispatch, ListBatch, Worker, make_nd_compute_dataproto_dispatch_fn, register
from tidemill_dispatch.ray import (
    RayClassWithInitArgs, RayResourcePool, RayWorkerGroup, create_colocated_worker_cls
)

class Counter(Worker):
    def __init__(self, start):
        self.count = start
        self.register_dispatch_collect_info("all", 1 - self.rank, True)

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn("all"))
    def add(self, batch):
        self.count += len(batch)
        return batch

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
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
print("made", flush=True)
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
def maker(cluster):
    command = [sys.executable, "-c", MAKER, ray.get_runtime_context().gcs_address]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        assert process.stdout.readline().strip() == "made"
        yield process
    finally:
        process.kill()
        process.wait()


def test_groups_of_another_driver_are_found_called_and_ended(maker):
    passing = RayWorkerGroup.from_detached("passing")
    assert passing.counts() == [10, 10]
    lasting = RayWorkerGroup.from_detached("lasting")
    assert lasting.counts() == [11, 12]  # dp rank 0 is rank 1 and has two of three rows

    assert maker.communicate("\n")[0] == ""
    assert maker.returncode == 0
    assert wait_for(lambda: [n for n in ray.util.list_named_actors() if n.startswith("passing")] == [])
    with pytest.raises(ValueError, match=r"no group 'passing' in Ray namespace 'tests'; it has \['lasting', 'roles'\]"):
        RayWorkerGroup.from_detached("passing")

    again = RayWorkerGroup.from_detached("lasting")  # its maker is gone
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
    assert ray.util.list_named_actors() == []


def test_names_are_taken_once_and_detached_groups_have_pools_of_their_own(maker):
    init = RayClassWithInitArgs(Worker)
    pool = RayResourcePool([2], num_cpus_per_worker=0.5, max_colocate_count=2)
    with RayWorkerGroup(pool, init, name_prefix="one", lifetime="named"):
        with pytest.raises(ValueError, match="a group named 'one' exists; find it with from_detached"):
            RayWorkerGroup(RayResourcePool([1], num_cpus_per_worker=0.5), init, name_prefix="one", lifetime="named")
        with pytest.raises(RuntimeError, match=r"group 'two' would share one, used by \['one'\]"):
            RayWorkerGroup(pool, init, name_prefix="two", lifetime="detached")
    with pytest.raises(RuntimeError, match="needs a whole pool of its own"):
        RayWorkerGroup(split_resource_pool(pool, 1)[0], init, name_prefix="two", lifetime="detached")
    with pytest.raises(ValueError, match="lifetime must be None, 'named' or 'detached', got 'forever'"):
        RayWorkerGroup(pool, create_colocated_worker_cls({"x": init}), name_prefix="x", lifetime="forever")
