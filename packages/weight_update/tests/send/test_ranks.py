"""Communication of trainer ranks over their own group. Functions with a leading underscore run on all ranks."""

import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from threading import Thread

import pytest
import torch
import torch.distributed as dist
from tidemill_testing import run_ranks
from tidemill_testing.ports import free_ports
from tidemill_weight_update import LocalShard, WeightUpdater
from tidemill_weight_update.control.board import here, process_state
from tidemill_weight_update.send.ranks import RankLostError, Ranks
from toy_engines import ToyEngine, holds, tensors

TIMEOUT_S = 2.0


def _wait_until_raised(folder: Path, number: int) -> None:
    """Report that this rank has raised an error, and wait until `number` ranks have. No store may be needed for it."""
    (folder / f"rank {dist.get_rank()} has raised").touch()
    while len(list(folder.glob("rank * has raised"))) < number:
        time.sleep(0.01)


def _process_ids() -> list[int]:
    pids = [0] * dist.get_world_size()
    dist.all_gather_object(pids, os.getpid())
    return pids


def _stopped(victim: int, folder: Path) -> tuple[str, bool]:
    rank = dist.get_rank()
    pids = _process_ids()
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
    if rank != victim:
        _wait_until_raised(folder, 2)
        os.kill(pids[victim], signal.SIGCONT)
    updater.close()
    dist.barrier()  # the process group of the trainer still works
    again = WeightUpdater(engines, bucket_bytes=100)
    again.update(tensors(2).items(), 2)
    again.close()
    return message, all(holds(engine, tensors(2)) for engine in engines)


@pytest.mark.parametrize("victim", [0, 1])
def test_rank_that_stops_while_it_sends_times_out_on_the_others(victim, tmp_path):
    for rank, (message, is_updated) in enumerate(run_ranks(_stopped, 3, victim, tmp_path)):
        assert is_updated
        if rank != victim:
            assert "a trainer rank does not respond" in message, (rank, message)
            assert re.search(rf": rank {victim} of 3 \(process \d+ on .*\) is stopped; see", message), (rank, message)


def _stopped_early(victim: int, where: str, folder: Path) -> str:
    rank = dist.get_rank()
    pids = _process_ids()
    group = dist.new_group(timeout=timedelta(seconds=2))
    engines = [ToyEngine(2)] if rank == 0 else []
    updater = WeightUpdater(engines, process_group=group)
    updater.update(tensors(0).items(), 0)

    def items() -> Iterator:
        for count, item in enumerate(tensors(1).items()):
            if count == 4 and rank == victim and where == "describes":
                os.kill(os.getpid(), signal.SIGSTOP)
            yield item

    if rank == victim and where == "before":
        os.kill(os.getpid(), signal.SIGSTOP)
    message = ""
    try:
        updater.update(items, 1)
    except RankLostError as error:
        message = str(error)
    if rank != victim:
        _wait_until_raised(folder, 2)
        os.kill(pids[victim], signal.SIGCONT)
    updater.close()
    dist.barrier()
    assert all(holds(engine, tensors(0)) and engine.version == "0" for engine in engines)
    return message


@pytest.mark.parametrize("where", ["before", "describes"])
@pytest.mark.parametrize("victim", [0, 2])
def test_rank_that_stops_before_anything_is_sent_is_named_by_the_others(victim, where, tmp_path):
    for rank, message in enumerate(run_ranks(_stopped_early, 3, victim, where, tmp_path)):
        if rank != victim:
            assert re.search(rf": rank {victim} of 3 \(process \d+ on .*\) is stopped; see", message), (rank, message)


def _late(folder: Path) -> str:
    rank = dist.get_rank()
    ranks = Ranks(None)
    ranks.exchange(None, [rank])
    if rank == 1:
        while len(list(folder.glob("rank * has raised"))) < 2:
            time.sleep(0.01)
    time.sleep(1.0 * (rank == 2))
    with pytest.raises(RankLostError) as caught:
        ranks.exchange(None, [rank], timeout_s=2)
    (folder / f"rank {rank} has raised").touch()
    with pytest.raises(RankLostError) as again:  # at once, with the same text
        ranks.exchange(None, [rank])
    assert str(again.value) == str(caught.value)
    dist.barrier()
    return str(caught.value)


def test_late_rank_is_named_and_the_exchange_fails_on_all_ranks(tmp_path):
    first, late, third = run_ranks(_late, 3, tmp_path)
    for message in (first, third):
        assert re.search(r": rank 1 of 3 \(process \d+ on .*\) did not call the method", message), message
    assert ": all ranks had begun, this one perhaps too late; see" in late


def _stopped_in_exchange() -> str:
    rank = dist.get_rank()
    pids = _process_ids()
    ranks = Ranks(None)
    message = ""
    if rank == 0:  # rank 1 would pass its numbers to rank 2
        time.sleep(0.5)
        os.kill(pids[1], signal.SIGSTOP)
    try:
        ranks.exchange(None, [rank], timeout_s=2)
    except RankLostError as error:
        message = str(error)
    if rank == 2:
        os.kill(pids[1], signal.SIGCONT)
    dist.barrier()  # a rank that exits before rank 2 looks would be named, too
    return message


def test_rank_that_stops_in_an_exchange_is_named():
    message = run_ranks(_stopped_in_exchange, 3)[2]
    assert re.search(r": rank 1 of 3 \(process \d+ on .*\) is stopped; see", message), message


def _stopped_with_store(port: int) -> str:
    rank = dist.get_rank()
    pids = _process_ids()
    dist.destroy_process_group()
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    ranks = Ranks(None)
    dist.barrier()
    if rank == 0:
        os.kill(os.getpid(), signal.SIGSTOP)
        return ""
    time.sleep(0.5)
    try:
        for _ in range(2):  # the second one, too, although the first reader of the store still waits
            with pytest.raises(RankLostError) as caught:
                ranks.exchange(None, [rank], timeout_s=1)
    finally:
        os.kill(pids[0], signal.SIGCONT)
    return str(caught.value)


def test_store_in_a_stopped_rank_does_not_prevent_the_error():
    message = run_ranks(_stopped_with_store, 2, *free_ports(1))[1]
    assert "which one is unknown: the store of torch.distributed, usually in global rank 0, does not respond" in message


def _store_elsewhere(port: int) -> None:
    """Ranks 1 and 2 exchange, while a thread of rank 1 waits for a key, and after rank 0 with the store has exited."""
    rank = dist.get_rank()
    pids = _process_ids()
    dist.destroy_process_group()
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=3)
    group = dist.new_group([1, 2])
    if rank == 0:
        dist.barrier()
        return
    ranks = Ranks(group)
    store = dist.distributed_c10d._get_default_store()
    if rank == 1:
        Thread(target=lambda: suppressed(store.wait, ["never"], timedelta(seconds=20)), daemon=True).start()
        time.sleep(0.5)
    started = time.monotonic()
    for number in range(3):
        assert ranks.exchange(None, [number], timeout_s=5) == [[number]] * 2
    assert time.monotonic() - started < 5
    dist.barrier()  # rank 0 exits
    while not process_state(pids[0], here()):
        time.sleep(0.05)
    for number in range(3):
        assert ranks.exchange(None, [number], timeout_s=5) == [[number]] * 2
    ranks.close()


def suppressed(action: Callable, *args: object) -> None:
    with suppress(RuntimeError):
        action(*args)


def test_outcome_does_not_depend_on_the_store():
    run_ranks(_store_elsewhere, 3, *free_ports(1))


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


def _slow_rank(folder: Path) -> list[list[int]]:
    rank = dist.get_rank()
    ranks = Ranks(None)
    if rank == 1:
        time.sleep(1)
    rows = ranks.exchange(None, [rank])  # waits as long as the process group does
    while rank == 1 and not (folder / "rank 0 has raised").exists():
        time.sleep(0.01)
    with pytest.raises(RankLostError) as caught:
        ranks.exchange(KeyError("t7") if rank == 0 else None, [rank], timeout_s=0.5)
    (folder / f"rank {rank} has raised").touch()
    assert getattr(caught.value, "__notes__", []) == ["this rank had failed before: KeyError: 't7'"] * (rank == 0)
    return rows


def test_exchange_without_timeout_waits_and_with_timeout_raises(tmp_path):
    assert run_ranks(_slow_rank, 2, tmp_path) == [[[0], [1]]] * 2


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


class HangingInPause(ToyEngine):
    """Engine whose server does not respond to a pause before its client's timeout."""

    def pause(self, mode):
        time.sleep(5)
        raise TimeoutError("no answer within 5 s")


def _pause_that_hangs() -> dict[str, str]:
    rank = dist.get_rank()
    engines = [HangingInPause(2, "bad"), HangingInPause(1, "worse"), ToyEngine(2, "good")] if rank == 0 else []
    updater = WeightUpdater(engines, bucket_bytes=100, in_flight="retract", timeout_s=2)
    stats = updater.update(tensors(1).items(), 1)
    assert all(holds(engine, tensors(1)) for engine in engines[2:])
    updater.close()
    return dict(stats.quarantined)


def test_engines_that_hang_in_a_pause_are_excluded_and_the_others_updated():
    for quarantined in run_ranks(_pause_that_hangs, 2):
        assert list(quarantined) == ["engine 0 of 3 (bad)", "engine 1 of 3 (worse)"]
        assert set(quarantined.values()) == {"it did not pause within 2 s; see its log"}
