"""Futures as arguments of another group's calls: rows are sent from worker to worker."""

import asyncio
import itertools
import os
import signal
import sys
import time
import weakref
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tidemill_dispatch import (
    CallTimeoutError,
    Dispatch,
    ListBatch,
    Padding,
    Replicate,
    Shard,
    Worker,
    WorkerDiedError,
    WorkerError,
    register,
    split_over,
)

ray = pytest.importorskip("ray")
from ray import cloudpickle  # noqa: E402
from tidemill_dispatch.ray import (  # noqa: E402
    CallFuture,
    RayClassWithInitArgs,
    RayResourcePool,
    RayWorkerGroup,
)

pytestmark = pytest.mark.ray
cloudpickle.register_pickle_by_value(sys.modules[__name__])
DP_SIZES = (1, 2, 4)


def pad(batch, divisor):
    count = -len(batch) % divisor
    return ListBatch([*batch.items, *["padding"] * count]), count


def unpad(batch, count):
    return ListBatch(batch.items[: len(batch) - count])


PADDING = Padding(pad=pad, unpad=unpad)


def over(dp_size, **kwargs):
    padding = kwargs.pop("padding", None)
    mode = split_over(f"dp{dp_size}", padding=padding)
    return register(dispatch_mode=mode, blocking=False, **kwargs)


class StageWorker(Worker):
    """Four ranks in meshes of 1, 2 and 4 shards. dp ranks are in reverse rank order; the last member is collected."""

    def __init__(self):
        for dp_size in DP_SIZES:
            member, dp_rank = divmod(self.rank, dp_size)
            self.register_dispatch_collect_info(
                f"dp{dp_size}", dp_size - 1 - dp_rank, is_collect=member == 4 // dp_size - 1, dp_size=dp_size
            )

    @over(1)
    def pass1(self, batch):
        return self.keep(batch)

    @over(2)
    def pass2(self, batch):
        return self.keep(batch)

    @over(4)
    def pass4(self, batch):
        return self.keep(batch)

    @over(1, padding=PADDING)
    def pad1(self, batch):
        return self.keep(batch)

    @over(2, padding=PADDING)
    def pad2(self, batch):
        return self.keep(batch)

    @over(4, padding=PADDING)
    def pad4(self, batch):
        return self.keep(batch)

    def keep(self, batch):
        self.rows = list(batch.items)
        return ListBatch(list(batch.items))

    @over(2)
    def repeat(self, batch, counts):
        return ListBatch([row for row, count in zip(batch, counts, strict=True) for _ in range(count)])

    @over(2)
    def two(self, first, second, *, third=None):
        return ListBatch(list(zip(first, second, first if third is None else third, strict=True)))

    @over(1)
    def both1(self, first, second):
        return ListBatch([(len(first), len(second))])

    @over(2, padding=PADDING)
    def padded_with(self, batch, whole):
        return ListBatch([(row, *whole) for row in batch])

    @over(2)
    def count(self, batch):
        return len(batch)

    @over(2)
    def make_large(self, batch):
        return ListBatch([os.urandom(row) for row in batch])

    @over(4)
    def sizes(self, batch):
        return ListBatch([len(row) for row in batch])

    @register(Dispatch.ONE_TO_ALL)
    def everything(self, batch, future=None):
        return batch.items if future is None else future.items

    @register(Dispatch.ONE_TO_ALL, blocking=False)
    def as_list(self):
        return self.rank

    @register(Dispatch.RANK_ZERO, blocking=False)
    def load(self, rows):
        return ListBatch(list(range(rows)))

    @over(2)
    def slow(self, batch, seconds=1.0):
        time.sleep(seconds)
        return batch

    @over(2, timeout_s=2.0)
    def hurried(self, batch):
        return batch

    @over(2)
    def wait_for(self, batch, file):
        while not file.exists():
            time.sleep(0.01)
        return batch

    @over(2)
    def one_rank_raises(self, batch, rank, until=None):
        if self.rank == rank:
            raise KeyError(f"rank {rank}")
        while until is not None and not until.exists():
            time.sleep(0.01)
        return batch

    @over(2)
    def exit_soon(self, batch):
        if self.rank == 3:
            time.sleep(0.5)
            os.kill(os.getpid(), signal.SIGKILL)
        return batch

    @register(Dispatch.ONE_TO_ALL)
    def kept(self):
        return self.rows

    @register(Dispatch.ONE_TO_ALL)
    def forget(self):
        self.rows = None


def start(name, **kwargs):
    pool = RayResourcePool([4], num_cpus_per_worker=0.25)
    return RayWorkerGroup(pool, RayClassWithInitArgs(StageWorker), name_prefix=name, timeout_s=60, **kwargs)


@pytest.fixture(scope="module")
def groups(ray_cluster):
    with start("first", blocking=False) as first, start("second", blocking=False) as second:
        first.wait_ready()
        second.wait_ready()
        yield first, second


def shard_of(rank, rows, dp_size):
    return ListBatch(rows).chunk(dp_size)[dp_size - 1 - rank % dp_size].items


@pytest.mark.parametrize(("before", "after"), list(itertools.product(DP_SIZES, DP_SIZES)))
def test_rows_reach_shards_of_another_dp_size(groups, before, after):
    first, second = groups
    for rows in (list(range(n)) for n in (0, 1, 3, 8, 11)):
        future = getattr(second, f"pass{after}")(getattr(first, f"pass{before}")(ListBatch(rows)))
        assert future.get() == ListBatch(rows)
        assert second.kept() == [shard_of(rank, rows, after) for rank in range(4)]


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    counts=st.lists(st.integers(0, 5), max_size=8),
    after=st.sampled_from(DP_SIZES),
    stages=st.lists(st.sampled_from([f"{kind}{n}" for kind in ("pass", "pad") for n in DP_SIZES]), max_size=3),
)
def test_rows_stay_in_order_through_any_stages(groups, counts, after, stages):
    first, second = groups
    rows = [f"{i}.{j}" for i, count in enumerate(counts) for j in range(count)]
    future = first.repeat(ListBatch(list(range(len(counts)))), ListBatch(counts))
    for i, stage in enumerate(stages):
        future = getattr(groups[i % 2], stage)(future)
    last = getattr(second, f"pad{after}")(future)
    assert last.get().items == [row for i, count in enumerate(counts) for row in [i] * count]
    assert len(rows) == len(last.get())
    kept = second.kept()
    assert {len(shard) for shard in kept} == {-(-len(rows) // after)}
    assert [[row for row in shard if row != "padding"] for shard in kept] == [
        shard_of(rank, last.get().items, after) for rank in range(4)
    ]


def test_futures_and_batches_in_one_call(groups):
    first, second = groups
    rows = list(range(5))
    a, b = first.pass4(ListBatch(rows)), second.pass1(ListBatch([10 * row for row in rows]))
    expected = [(row, 10 * row, "abcde"[row]) for row in rows]
    assert second.two(a, b, third=Shard(["a", "b", "c", "d", "e"])).get().items == expected
    assert second.two(a, Shard(b), third=ListBatch(list("abcde"))).get().items == expected


def test_futures_of_different_lengths_are_a_worker_error(groups):
    first, second = groups
    with pytest.raises(WorkerError, match=r"'pass1' of group 'first' returned 6 rows, 3 of them in shard 0 of 2"):
        second.two(first.pass1(ListBatch(list(range(6)))), ListBatch(list(range(4)))).get()
    with pytest.raises(WorkerError, match=r"the shards of this rank have 'pass1' of group 'first': 3, 'pass2'"):
        second.two(first.pass1(ListBatch(list(range(6)))), first.pass2(ListBatch([1, 2]))).get()
    six, four = first.pass1(ListBatch(list(range(6)))), first.pass1(ListBatch(list(range(4))))
    with pytest.raises(WorkerError, match="'pass1' of group 'first': 3, 'pass1' of group 'first': 2"):
        second.two(six, four).get()
    with pytest.raises(WorkerError, match="'pass1' of group 'first': 6, 'pass1' of group 'first': 4"):
        second.both1(six, four).get()
    assert second.both1(six, Replicate(four)).get().items == [(6, 4)]


def test_replicated_future_reaches_every_rank_whole(groups):
    first, second = groups
    future = first.pass2(ListBatch([1, 2, 3]))
    assert second.everything(future) == [[1, 2, 3]] * 4
    assert second.everything(1, future=Replicate(future)) == [[1, 2, 3]] * 4
    nine = first.pass2(ListBatch([9]))
    assert second.two(ListBatch([7, 8]), Replicate(nine)).get().items == [(7, 9, 7), (8, 9, 8)]
    assert second.pass4(first.load(6)).get().items == list(range(6))
    for whole in (Replicate(nine), Replicate(ListBatch([9]))):  # padding is made from the rows of the shards
        assert second.padded_with(ListBatch(list(range(5))), whole).get().items == [(row, 9) for row in range(5)]


def test_get_await_and_chaining_of_a_future_work_in_any_order(groups):
    first, second = groups
    future = first.pass2(ListBatch([1, 2, 3]))
    assert isinstance(future, CallFuture)
    assert future.get().items == [1, 2, 3]
    assert second.pass4(future).get().items == [1, 2, 3]
    assert second.pass1(future).get().items == [1, 2, 3]
    assert future.get().items == [1, 2, 3]

    async def both():
        return await asyncio.gather(*[asyncio.wait_for(group.pass2(ListBatch([4])), 30) for group in groups])

    assert [batch.items for batch in asyncio.run(both())] == [[4], [4]]


def test_finished_upstream_calls_are_released(groups):
    first, second = groups
    future = first.pass2(ListBatch([1]))
    before = []
    for _ in range(3):
        before.append(weakref.ref(future.call))
        future = second.pass4(future)
    assert future.get().items == [1]
    assert [call() for call in before] == [None] * 3
    middle = first.slow(ListBatch([1]), 0.3)
    last = second.pass4(middle)
    before = weakref.ref(middle.call)
    del middle
    assert before() is not None
    while not last.done():
        time.sleep(0.02)
    assert before() is None


def test_timeout_of_a_chained_call_starts_at_the_end_of_its_upstream_call(groups, tmp_path):
    first, second = groups
    last = second.hurried(first.slow(ListBatch([1, 2]), 2.5))
    assert last.call.timeout_s < 2.5
    assert not last.done()  # the driver did not wait
    assert last.get().items == [1, 2]
    late = second.pass2(first.wait_for(ListBatch([1, 2]), tmp_path / "end"))
    with pytest.raises(CallTimeoutError, match=r"'wait_for' of group 'first' .* \[0, 1, 2, 3\] are still running"):
        late.get(timeout_s=0.1)
    (tmp_path / "end").touch()
    assert late.get().items == [1, 2]


@pytest.mark.parametrize("rank", [0, 2])  # ranks 0 and 1 are not collected
def test_error_of_upstream_call_is_raised_and_later_calls_do_not_run(groups, rank):
    first, second = groups
    second.forget()
    future = second.pass4(second.pass2(first.one_rank_raises(ListBatch([1, 2]), rank)))
    with pytest.raises(WorkerError, match=f"KeyError on rank {rank} of group 'first'") as caught:
        future.get()
    assert caught.value.method == "one_rank_raises"
    assert second.kept() == [None] * 4
    assert second.pass2(ListBatch([1])).get().items == [1]


def test_error_of_upstream_call_is_raised_while_its_other_ranks_run(groups, tmp_path):
    first, second = groups
    future = second.pass2(first.one_rank_raises(ListBatch([1, 2]), 1, tmp_path / "end"))
    with pytest.raises(WorkerError, match="KeyError on rank 1 of group 'first'") as caught:
        future.get()
    (tmp_path / "end").touch()
    assert caught.value.still_running == (0, 2, 3)


def test_futures_that_cannot_be_arguments_are_refused(groups):
    first, second = groups
    with pytest.raises(TypeError, match="the results of 'as_list' of group 'first' are not parts of one batch"):
        second.pass2(first.as_list())
    future = first.pass2(ListBatch([1]))
    with pytest.raises(TypeError, match=r"argument 0 of StageWorker.pass2 cannot be pickled: it holds the future of"):
        second.pass2([future])
    with pytest.raises(WorkerError, match="'count' of group 'first' did not return a batch on every dp rank"):
        second.pass2(first.count(ListBatch([1, 2]))).get()


def mapped_bytes():
    """Bytes of Ray's object store that are mapped and were accessed in this process."""
    found, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split(" ", 1)[0] and not line.endswith("kB"):
            inside = "plasma" in line
        elif inside and line.startswith("Rss:"):
            found += 1024 * int(line.split()[1])
    return found


def test_rows_of_chained_calls_do_not_reach_the_driver(groups):
    first, second = groups
    sizes = [4_000_000] * 6
    before = mapped_bytes()
    made = first.make_large(ListBatch(sizes))
    assert second.sizes(made).get().items == sizes
    assert mapped_bytes() - before < 1_000_000
    assert [len(row) for row in made.get()] == sizes
    assert mapped_bytes() - before > 20_000_000  # proves that the measurement works


def test_death_in_upstream_group_is_named_and_the_other_group_is_usable(groups):
    _, second = groups
    with start("mortal") as first:
        future = second.pass4(first.exit_soon(ListBatch([1, 2])))
        with pytest.raises(WorkerDiedError, match=r"rank 3 of group 'mortal' .* died during 'exit_soon'"):
            future.get()
    assert second.pass2(ListBatch([1])).get().items == [1]


def test_death_in_later_group_is_noticed_while_upstream_call_runs(groups):
    first, _ = groups
    with start("mortal") as second:
        assert second.dp_size("dp4") == 4
        failing = second.exit_soon(ListBatch([1, 2]))
        upstream = first.slow(ListBatch([1, 2]), 30.0)
        future = second.pass4(upstream)
        with pytest.raises(WorkerDiedError, match="rank 3 of group 'mortal'"):
            future.get()
        assert not upstream.done()
        with pytest.raises(WorkerDiedError, match="rank 3 of group 'mortal'"):
            failing.get()
