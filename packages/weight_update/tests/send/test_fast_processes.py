"""The fast path between processes, some of which are killed or stopped on the way."""

import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from process_engines import ProcessEngine, serve, trainers
from tidemill_weight_update import WeightUpdater
from toy_engines import ToyEngine, freshly_loaded, holds, tensors


def same_as_fresh(engine: ProcessEngine, checkpoint) -> bool:
    fresh = freshly_loaded(ToyEngine(engine.tp_size), checkpoint)
    return all(
        name in got and got[name].equal(tensor.float())
        for got, rank in zip(engine.state(), fresh, strict=True)
        for name, tensor in rank.items()
    )


@pytest.fixture
def started() -> Iterator:
    """`started(tp_size, name, timeout_s)` starts an engine that ends with the test."""
    engines: list[ProcessEngine] = []

    def start(*args, **kwargs) -> ProcessEngine:
        engines.append(ProcessEngine(*args, **kwargs))
        return engines[-1]

    yield start
    for engine in engines:
        engine.close()


def with_an_event(count: int, event, seed: int = 1):
    """The tensors one by one; `event()` happens before number `count`."""
    for number, item in enumerate(tensors(seed).items()):
        if number == count:
            event()
        yield item


def test_engines_in_processes_of_their_own(started):
    engines = [started(2, "two"), started(1, "one")]
    updater = WeightUpdater(engines, bucket_bytes=100)
    for version in range(3):
        checkpoint = tensors(version)
        stats = updater.update(checkpoint.items() if version < 2 else iter(checkpoint.items()), version)
        assert (stats.verified, stats.quarantined) == (True, {})
        assert all(same_as_fresh(engine, checkpoint) for engine in engines)
    updater.close()


def memory_of_trainers(pid: int) -> list[str]:
    """The inodes of what the process maps."""
    maps = Path(f"/proc/{pid}/maps").read_text()
    return sorted({line.split()[4] for line in maps.splitlines() if "memfd:tidemill" in line})


def test_an_engine_lets_go_of_a_trainers_memory_when_another_comes(started):
    engine = started(1, "one")
    for version in range(3):
        updater = WeightUpdater([engine], bucket_bytes=100)
        updater.update(tensors(version).items(), version)
        updater.close()
        # One mailbox and two halves of an arena, of this trainer alone.
        assert len(memory_of_trainers(engine.processes[0].pid)) == 3


@pytest.mark.parametrize("killed", [[1], [0, 1]])
def test_an_engine_that_is_killed_is_fenced_and_the_others_go_on(started, killed):
    bad, good = started(2, "bad"), started(2, "good")
    updater = WeightUpdater([bad, good], bucket_bytes=100, timeout_s=30)
    updater.update(tensors(0).items(), 0)
    pids = [bad.processes[rank].pid for rank in killed]
    before = time.monotonic()
    stats = updater.update(with_an_event(8, lambda: [os.kill(pid, signal.SIGKILL) for pid in pids]), 1)
    assert time.monotonic() - before < 15
    assert list(stats.quarantined) == ["engine 0 of 2 (bad)"]
    assert same_as_fresh(good, tensors(1))
    assert (good.version, bad.version) == ("1", "0")
    bad.close()
    bad.start()  # anew, as an operator would
    assert updater.update(tensors(2).items(), 2, engines=[bad, good]).quarantined == {}
    assert same_as_fresh(bad, tensors(2))
    updater.close()


def test_the_rank_that_was_killed_is_told_by_the_others(started):
    """The engine's client does not know it, but the other rank does."""
    bad = started(2, "bad")

    class Patient(ProcessEngine):
        def load(self, request, *, flush_cache):
            for connection in self._connections:
                connection.send((1, request))
            self._connections[0].recv()

    bad.__class__ = Patient
    updater = WeightUpdater([bad], bucket_bytes=100, timeout_s=30)
    pid = bad.processes[1].pid
    with pytest.raises(
        RuntimeError, match=rf"engine 0 of 1 \(bad\): rank 0: .*rank 1 of this engine \(process {pid}\)"
    ):
        updater.update(with_an_event(8, lambda: os.kill(pid, signal.SIGKILL)), 1)
    updater.close()


def test_an_engine_that_is_stopped_is_fenced_and_may_come_back(started):
    bad, good = started(1, "bad", timeout_s=5.0), started(1, "good")
    updater = WeightUpdater([bad, good], bucket_bytes=100, timeout_s=1.5)
    updater.update(tensors(0).items(), "first")
    pid = bad.processes[0].pid
    stats = updater.update(with_an_event(8, lambda: os.kill(pid, signal.SIGSTOP)), 1)
    try:
        assert list(stats.quarantined) == ["engine 0 of 2 (bad)"]
        assert (good.version, bad.version, bad.paused) == ("1", "first", "abort")
        assert same_as_fresh(good, tensors(1))
        updater.update(tensors(2).items(), 2)
    finally:
        os.kill(pid, signal.SIGCONT)
    assert updater.update(tensors(3).items(), 3, engines=[good, bad]).quarantined == {}
    assert same_as_fresh(bad, tensors(3))
    assert (bad.version, bad.paused) == ("3", None)
    updater.close()


@pytest.mark.parametrize("mode", ["complete", "streaming"])
@pytest.mark.parametrize(("world_size", "killed"), [(1, 0), (2, 0), (2, 1), (3, 2)])
def test_a_trainer_rank_that_is_killed_leaves_the_engine_in_a_known_state(tmp_path, world_size, killed, mode):
    engine = ToyEngine(2)
    updater = WeightUpdater([engine])
    updater.update(tensors(0).items(), "before")
    updater.close()
    begun = time.monotonic()
    with trainers(world_size, str(tmp_path / "store"), killed, mode) as connection:
        told = serve(engine, connection)
        assert time.monotonic() - begun < 60
        assert engine.version == "before"
        if killed == 0:
            assert told is None
        else:
            assert told is not None
            assert re.search("RankLostError: a trainer rank does not respond", told), told
        if mode == "complete":
            assert holds(engine, tensors(0))  # it was killed before anything was sent
            assert engine.paused is None
        elif killed > 0:
            cause = rf"(trainer rank [\d(),a-z ]*\b{killed} \(process|trainer rank {killed}: cannot open)"
            assert re.search(rf"engine 0 of 1 \(EngineProxy\): rank \d(, \d)*: .*{cause}", told), told
            if engine.paused is None:  # it ended before the engine had come to it
                assert holds(engine, tensors(0))
            else:
                assert engine.paused == "abort"
    after = WeightUpdater([engine], bucket_bytes=300)  # a new trainer
    assert after.update(tensors(2).items(), "after").verified
    assert holds(engine, tensors(2))
    after.close()
