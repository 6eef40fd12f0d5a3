"""Chains of calls that are longer than Python's recursion limit allows for recursion."""

import sys
import time

import pytest
from tidemill_dispatch import Dispatch, ListBatch, Worker, WorkerError, register, split_over

ray = pytest.importorskip("ray")
from ray import cloudpickle  # noqa: E402
from tidemill_dispatch.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup  # noqa: E402

pytestmark = pytest.mark.ray
cloudpickle.register_pickle_by_value(sys.modules[__name__])
LENGTH = 600


class Counter(Worker):
    @register(Dispatch.ONE_TO_ALL)
    def init_model(self):
        self.register_dispatch_collect_info("actor", dp_rank=self.rank, is_collect=True)

    @register(split_over("actor"), blocking=False)
    def count(self, batch, *, refused=None, seconds=0.0):
        time.sleep(seconds)
        if refused in batch.items:
            raise ValueError(f"{refused} is refused")
        return ListBatch([item + 1 for item in batch.items])


@pytest.fixture(scope="module")
def counters(ray_cluster):
    pool = RayResourcePool([2], num_cpus_per_worker=0.25)
    with RayWorkerGroup(pool, RayClassWithInitArgs(Counter), name_prefix="counters", timeout_s=60) as group:
        group.init_model()
        yield group


def test_long_chain_returns_the_last_result(counters):
    assert sys.getrecursionlimit() / 2 < LENGTH
    future = counters.count(ListBatch([0, 10]), seconds=2.0)
    for _ in range(LENGTH):
        future = counters.count(future)
    assert not future.done()  # checks all upstream calls
    assert future.get().items == [LENGTH + 1, LENGTH + 11]


def test_error_of_the_first_call_is_raised_by_the_last(counters):
    future = counters.count(ListBatch([0, 10]), refused=10)
    for _ in range(LENGTH):
        future = counters.count(future)
    with pytest.raises(WorkerError, match="10 is refused"):
        future.get()
    assert counters.count(ListBatch([0, 10])).get().items == [1, 11]
