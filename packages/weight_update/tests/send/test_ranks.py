"""Communication of trainer ranks over their own group. Functions with a leading underscore run on all ranks."""

import os
import re
import signal
import time
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from tidemill_testing import run_ranks
from tidemill_weight_update import LocalShard, WeightUpdater
from tidemill_weight_update.send.ranks import RankLostError, Ranks
from toy_engines import ToyEngine, holds, tensors

TIMEOUT_S = 1.0


def _stopped(victim: int) -> tuple[str, bool]:
    rank = dist.get_rank()
    pids: list[int] = [0] * dist.get_world_size()
    dist.all_gather_object(pids, os.getpid())
    engines = [ToyEngine(2)] if rank == 0 else []
    first = WeightUpdater(engines, bucket_bytes=100)  # plans are recorded without the short timeout
    first.update(tensors(0).items(), 0)
    first.close()
    updater = WeightUpdater(engines, bucket_bytes=100, timeout_s=TIMEOUT_S)
    updater.update(tensors(0).items(), 0)

    made = []

    def items() -> Iterator:
        made.append(None)
        for count, item in enumerate(tensors(1).items()):
            if count == 4 and rank == victim and len(made) == 2:  # sent, after it was described
                os.kill(os.getpid(), signal.SIGSTOP)
            yield item

    message = ""
    try:
        updater.update(items, 1)
    except RankLostError as error:
        message = str(error)
    if rank == (victim + 1) % 3:
        time.sleep(0.5)  # the third rank has timed out, too
        os.kill(pids[victim], signal.SIGCONT)
    updater.close()
    dist.barrier()  # the process group of the trainer still works
    again = WeightUpdater(engines, bucket_bytes=100)
    again.update(tensors(2).items(), 2)
    again.close()
    return message, all(holds(engine, tensors(2)) for engine in engines)


@pytest.mark.parametrize("victim", [0, 1])
def test_rank_that_stops_while_it_sends_times_out_on_the_others(victim):
    for rank, (message, is_updated) in enumerate(run_ranks(_stopped, 3, victim)):
        assert is_updated
        if rank != victim:
            assert "a trainer rank does not respond" in message, (rank, message)
            assert re.search(rf"; trainer rank {victim} \(process \d+\) hangs while it sends", message), (rank, message)


def _collection_and_function() -> bool:
    rank = dist.get_rank()
    engines = [ToyEngine(2)] if rank == 0 else []
    updater = WeightUpdater(engines, bucket_bytes=100, timeout_s=20)
    for version, function in enumerate((0, 1, 0)):
        items = list(tensors(version).items()) if rank == 0 else []
        name, tensor = "norm.weight", tensors(version)["norm.weight"]
        half = LocalShard(tensor=tensor[4 * rank : 4 * rank + 4], global_shape=(8,), start=(4 * rank,))
        items = [*(item for item in items if item[0] != name), (name, half)]
        updater.update((lambda items=items: iter(items)) if rank == function else items, version)
        assert all(holds(engine, tensors(version)) for engine in engines)
    updater.close()
    return True


def test_one_rank_may_pass_a_collection_and_another_a_function():
    assert all(run_ranks(_collection_and_function, 2))


def _slow_rank() -> list[list[int]]:
    rank = dist.get_rank()
    ranks = Ranks(None)
    if rank == 1:
        time.sleep(1)
    rows = ranks.exchange(None, [rank])  # waits as long as the process group does
    if rank == 1:
        time.sleep(1)
    with pytest.raises(RankLostError) as caught:
        ranks.exchange(KeyError("t7") if rank == 0 else None, [rank], timeout_s=0.5)
    assert getattr(caught.value, "__notes__", []) == ["this rank had failed before: KeyError: 't7'"] * (rank == 0)
    return rows


def test_exchange_without_timeout_waits_and_with_timeout_raises():
    assert run_ranks(_slow_rank, 2) == [[[0], [1]]] * 2


def _resources() -> tuple[int, int]:
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


def _made_and_closed(times: int) -> bool:
    made = [Ranks(None) for _ in range(2)]
    for ranks in made:
        ranks.close()
    before = _resources()
    for number in range(times):
        ranks = Ranks(None)
        assert ranks.gather_texts(f"{number}" if ranks.rank == 0 else "")[0] == str(number)
        ranks.close()  # other ranks may still be reading
        ranks.close()
        assert ranks.exchange(None, [7]) == [[7]]
    dist.barrier()
    deadline = time.monotonic() + 5
    while _resources() > before and time.monotonic() < deadline:
        time.sleep(0.02)
    return _resources() <= before


def test_closed_groups_release_files_and_threads():
    assert run_ranks(_made_and_closed, 3, 20) == [True] * 3


def _with_default_device(device: str) -> tuple[list[list[int]], list[str], list[str], str]:
    rank = dist.get_rank()
    ranks = Ranks(None)
    with torch.device(device):
        rows = ranks.exchange(None, [rank])
        texts = ranks.gather_texts("a" * rank)
        long = [ranks.gather_texts(text if rank == 0 else "")[0] for text in ("short", "long" * 2000)]
        with pytest.raises((KeyError, RuntimeError)) as caught:
            ranks.exchange(KeyError("lost") if rank == 1 else None, [])
    note = "raised on rank 1 of 2 of this weight update"
    assert getattr(caught.value, "__notes__", []) == [note] * (rank == 1)
    return rows, texts, long, str(caught.value)


def test_exchange_works_with_any_default_device():
    common = [[0], [1]], ["", "a"], ["short", "long" * 2000]
    message = "weight update failed on rank 1 of 2: KeyError: 'lost'"
    assert run_ranks(_with_default_device, 2, "meta") == [(*common, message), (*common, "'lost'")]
