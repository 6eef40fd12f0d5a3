"""`await` of futures: results, errors, timeouts, and a cancelled await."""

import asyncio
import math
import sys
import time

import pytest
from tidemill_dispatch import CallTimeoutError, Dispatch, Worker, WorkerError, register

ray = pytest.importorskip("ray")
from ray import cloudpickle  # noqa: E402
from tidemill_dispatch.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup  # noqa: E402

pytestmark = pytest.mark.ray
cloudpickle.register_pickle_by_value(sys.modules[__name__])


class Sleeper(Worker):
    @register(Dispatch.ONE_TO_ALL, blocking=False)
    def sleep(self, seconds):
        time.sleep(seconds)
        return seconds

    @register(Dispatch.ONE_TO_ALL, blocking=False)
    def wait_for(self, file):
        while not file.exists():
            time.sleep(0.01)

    @register(Dispatch.ONE_TO_ALL, blocking=False, timeout_s=0.2)
    def too_slow(self, until):
        while not until.exists():
            time.sleep(0.01)

    @register(Dispatch.ONE_TO_ALL, blocking=False, timeout_s=math.inf)
    def rank_without_timeout(self):
        return self.rank

    @register(Dispatch.ONE_TO_ALL, blocking=False)
    def rank_zero_raises(self):
        if self.rank == 0:
            raise ValueError("zero")
        time.sleep(3)


@pytest.fixture(scope="module")
def group(ray_cluster):
    pool = RayResourcePool(process_on_nodes=[2])
    with RayWorkerGroup(pool, RayClassWithInitArgs(Sleeper), name_prefix="awaited", timeout_s=60) as group:
        yield group


async def result_of(future):
    return await future


async def longest_pause_during(future):
    """Await a future; return its error and the longest time for which the event loop did not run another task."""
    pauses = [0.0]

    async def watch():
        while True:
            start_s = time.monotonic()
            await asyncio.sleep(0.01)
            pauses.append(time.monotonic() - start_s)

    watcher = asyncio.ensure_future(watch())
    (error,) = await asyncio.gather(future, return_exceptions=True)
    watcher.cancel()
    return error, max(pauses)


def test_result_can_be_awaited_and_many_futures_together(group):
    async def all_of(futures):
        return await asyncio.gather(*futures)

    assert asyncio.run(result_of(group.sleep(0))) == [0, 0]
    done = group.sleep(0.0)
    assert done.get() == asyncio.run(result_of(done)) == [0.0, 0.0]
    assert asyncio.run(all_of([group.sleep(0) for _ in range(30)])) == [[0, 0]] * 30


def test_cancelled_await_ends_before_the_call_and_the_future_can_be_got(group, tmp_path):
    future = group.wait_for(tmp_path / "end")
    with pytest.raises(asyncio.TimeoutError):
        asyncio.run(asyncio.wait_for(result_of(future), 0.2))
    (tmp_path / "end").touch()
    assert future.get() == [None, None]


def test_timeout_of_a_call_is_raised_by_await(group, tmp_path):
    with pytest.raises(CallTimeoutError, match=r"'too_slow' of group 'awaited' did not finish within 0\.2 s"):
        asyncio.run(result_of(group.too_slow(tmp_path / "end")))
    (tmp_path / "end").touch()


def test_event_loop_runs_while_an_error_waits_for_other_ranks(group):
    error, pause_s = asyncio.run(longest_pause_during(group.rank_zero_raises()))
    assert isinstance(error, WorkerError)
    assert (error.rank, error.still_running) == (0, (1,))
    assert pause_s < 0.8  # the error waits for one second


def test_call_without_a_timeout_is_awaited(group):
    assert asyncio.run(result_of(group.rank_without_timeout())) == [0, 1]
