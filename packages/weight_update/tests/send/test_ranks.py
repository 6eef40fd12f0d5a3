"""What trainer ranks tell each other, over a group of their own. What begins with an underscore runs on all of them."""

import os
import signal
import time
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from tidemill_testing import run_ranks
from tidemill_weight_update import LocalShard, WeightUpdater
from tidemill_weight_update.send.ranks import RankLostError, Ranks
from toy_engines import SHAPES, ToyEngine, holds, tensors

TIMEOUT_S = 1.0


def _stopped(victim: int, kind: str) -> tuple[str, float, bool]:
    rank = dist.get_rank()
    pids: list[int] = [0] * dist.get_world_size()
    dist.all_gather_object(pids, os.getpid())
    engines = [ToyEngine(2)] if rank == 0 else []
    first = WeightUpdater(engines, bucket_bytes=100)  # what is loaded and made once may take longer
    first.update(tensors(0).items(), 0)
    first.close()
    updater = WeightUpdater(engines, bucket_bytes=100, timeout_s=TIMEOUT_S)
    updater.update(tensors(0).items(), 0)

    def items() -> Iterator:
        for count, item in enumerate(tensors(1).items()):
            if count == 4 and rank == victim:
                os.kill(os.getpid(), signal.SIGSTOP)
            yield item

    started, told = time.monotonic(), ""
    try:
        updater.update(items() if kind == "streaming" else Late(items), 1)
    except RankLostError as error:
        told = str(error)
    seconds = time.monotonic() - started
    if rank == (victim + 1) % 3:
        time.sleep(0.5)  # the third has had its time
        os.kill(pids[victim], signal.SIGCONT)
    updater.close()
    dist.barrier()  # the group that they were given still serves
    again = WeightUpdater(engines, bucket_bytes=100)
    again.update(tensors(2).items(), 2)
    again.close()
    return told, seconds, all(holds(engine, tensors(2)) for engine in engines)


class Late(list):
    """A collection whose items come from a generator when it is first looked at."""

    def __init__(self, items: Callable[[], Iterator]) -> None:
        super().__init__()
        self._items = items

    def __iter__(self) -> Iterator:
        return self._items()


@pytest.mark.parametrize(("victim", "kind"), [(0, "streaming"), (1, "streaming"), (2, "complete")])
def test_a_rank_that_is_stopped_is_lost_to_the_others_in_time(victim, kind):
    for rank, (told, seconds, is_well) in enumerate(run_ranks(_stopped, 3, victim, kind)):
        assert is_well
        if rank != victim:
            assert "a trainer rank does not respond" in told, (rank, told)
            assert seconds < 3 * TIMEOUT_S + 3


def _of_mixed_kinds(streaming: int, partial: bool) -> tuple[str, bool]:
    rank = dist.get_rank()
    engines = [ToyEngine(2)] if rank == 0 else []
    updater = WeightUpdater(engines, bucket_bytes=100, timeout_s=5, in_flight="retract")
    updater.update(tensors(0).items(), 0)
    whole = tensors(1)
    norm = LocalShard(tensor=whole.pop("norm.weight"), global_shape=tuple(SHAPES["norm.weight"]))
    items = [("norm.weight", norm)] if rank == 1 else list(whole.items())
    with pytest.raises(TypeError) as caught:
        updater.update(iter(items) if rank == streaming else items, 1, partial=partial)
    for engine in engines:
        assert holds(engine, tensors(0))
        assert (engine.paused, engine.version, engine.calls.count("pause retract")) == (None, "0", 1)
    updater.update(iter(items), 2)
    updater.close()
    return str(caught.value), all(holds(engine, tensors(1)) for engine in engines)


@pytest.mark.parametrize(("streaming", "partial"), [(0, False), (1, False), (1, True)])
def test_ranks_that_pass_a_collection_and_a_generator_are_told_so_before_anything_changes(streaming, partial):
    for told, is_well in run_ranks(_of_mixed_kinds, 2, streaming, partial):
        assert told.startswith(f"rank {streaming} of 2 passed a generator and the others a collection")
        assert is_well


def _late() -> list[list[int]]:
    rank = dist.get_rank()
    ranks = Ranks(None)
    if rank == 1:
        time.sleep(2)
    rows = ranks.exchange(None, [rank])  # as long as the process group waits
    if rank == 1:
        time.sleep(2)
    with pytest.raises(RankLostError) as caught:
        ranks.exchange(KeyError("t7") if rank == 0 else None, [rank], timeout_s=0.5)
    assert getattr(caught.value, "__notes__", []) == ["this rank had failed before: KeyError: 't7'"] * (rank == 0)
    return rows


def test_only_a_wait_that_is_limited_ends_soon():
    assert run_ranks(_late, 2) == [[[0], [1]]] * 2


def _resources() -> tuple[int, int]:
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


def _made_and_closed(times: int) -> bool:
    made = [Ranks(None) for _ in range(2)]
    for ranks in made:
        ranks.close()
    before = _resources()
    for number in range(times):
        ranks = Ranks(None)
        assert ranks.from_first(f"{number}" if ranks.rank == 0 else "") == str(number)
        ranks.close()  # the others may still be reading
        ranks.close()
        assert ranks.exchange(None, [7]) == [[7]]
    dist.barrier()
    deadline = time.monotonic() + 5
    while _resources() > before and time.monotonic() < deadline:
        time.sleep(0.02)
    return _resources() <= before


def test_groups_leave_nothing_behind():
    assert run_ranks(_made_and_closed, 3, 20) == [True] * 3


def _overlapping() -> list[list[int]]:
    world, rank = Ranks(None), dist.get_rank()
    pair = dist.new_group([1, 2])
    own = Ranks(pair) if rank > 0 else None
    rows = [] if own is None else own.exchange(None, [own.rank, own.owner])
    world.exchange(None, [rank])
    return rows


def test_groups_may_overlap():
    assert run_ranks(_overlapping, 3) == [[], [[0, 1], [1, 1]], [[0, 1], [1, 1]]]


def _with_default_device(device: str) -> tuple[list[list[int]], list[str], list[str], str]:
    rank = dist.get_rank()
    ranks = Ranks(None)
    with torch.device(device):
        rows = ranks.exchange(None, [rank])
        texts = ranks.gather_texts("a" * rank)
        long = [ranks.from_first(text if rank == 0 else "") for text in ("short", "long" * 2000)]
        with pytest.raises((KeyError, RuntimeError)) as caught:
            ranks.exchange(KeyError("lost") if rank == 1 else None, [])
    return rows, texts, long, str(caught.value)


def test_ranks_talk_whatever_the_trainers_default_device():
    common = [[0], [1]], ["", "a"], ["short", "long" * 2000]
    told = "weight update failed on rank 1 of 2: KeyError: 'lost'"
    assert run_ranks(_with_default_device, 2, "meta") == [(*common, told), (*common, "'lost'")]
