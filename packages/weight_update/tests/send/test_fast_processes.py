"""Fast path between processes, some of which are killed or stopped during the update."""

import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from process_engines import ProcessEngine, serve, trainers
from sources import WithEvent
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
def start_engine() -> Iterator:
    """`start_engine(tp_size, name, timeout_s)`: start an engine that is closed at the end of the test."""
    engines: list[ProcessEngine] = []

    def start(*args, **kwargs) -> ProcessEngine:
        engines.append(ProcessEngine(*args, **kwargs))
        return engines[-1]

    yield start
    for engine in engines:
        engine.close()


def test_engines_in_other_processes_are_updated(start_engine):
    engines = [start_engine(2, "two"), start_engine(1, "one")]
    updater = WeightUpdater(engines, bucket_bytes=100)
    for version in range(3):
        checkpoint = tensors(version)
        stats = updater.update(checkpoint.items() if version < 2 else checkpoint.items, version)
        assert (stats.verified, stats.quarantined) == (True, {})
        assert all(same_as_fresh(engine, checkpoint) for engine in engines)
    updater.close()


def mapped_trainer_inodes(pid: int) -> list[str]:
    """Inodes of the trainer memory that the process has mapped."""
    maps = Path(f"/proc/{pid}/maps").read_text()
    return sorted({line.split()[4] for line in maps.splitlines() if "memfd:tidemill" in line})


def test_engine_unmaps_memory_of_the_previous_trainer(start_engine):
    engine = start_engine(1, "one")
    for version in range(3):
        updater = WeightUpdater([engine], bucket_bytes=100)
        updater.update(tensors(version).items(), version)
        updater.close()
        # One mailbox and two halves of an arena, all of this trainer.
        assert len(mapped_trainer_inodes(engine.processes[0].pid)) == 3


@pytest.mark.parametrize("killed", [[1], [0, 1]])
def test_killed_engine_is_quarantined_and_others_are_updated(start_engine, killed):
    bad, good = start_engine(2, "bad"), start_engine(2, "good")
    updater = WeightUpdater([bad, good], bucket_bytes=100, timeout_s=30)
    updater.update(tensors(0).items(), 0)
    pids = [bad.processes[rank].pid for rank in killed]
    stats = updater.update(WithEvent(tensors(1).items(), 8, lambda: [os.kill(pid, signal.SIGKILL) for pid in pids]), 1)
    assert list(stats.quarantined) == ["engine 0 of 2 (bad)"]
    assert same_as_fresh(good, tensors(1))
    assert (good.version, bad.version) == ("1", "0")
    bad.close()
    bad.start()  # restart
    assert updater.readmit([bad, good], tensors(2).items(), 2).quarantined == {}
    assert same_as_fresh(bad, tensors(2))
    updater.close()


def test_killed_rank_is_reported_by_the_other_ranks(start_engine):
    """The client of the engine does not notice it, but the other rank does."""
    bad = start_engine(2, "bad")

    class WaitsForFirstRank(ProcessEngine):
        def load(self, request, *, flush_cache):
            for connection in self._connections:
                connection.send((1, request))
            self._connections[0].recv()

    bad.__class__ = WaitsForFirstRank
    updater = WeightUpdater([bad], bucket_bytes=100, timeout_s=30)
    pid = bad.processes[1].pid
    with pytest.raises(
        RuntimeError, match=rf"engine 0 of 1 \(bad\): rank 0: .*rank 1 of this engine \(process {pid}\)"
    ):
        updater.update(WithEvent(tensors(1).items(), 8, lambda: os.kill(pid, signal.SIGKILL)), 1)
    updater.close()


def test_stopped_engine_is_quarantined_and_updated_after_it_continues(start_engine):
    bad, good = start_engine(1, "bad", timeout_s=10.0), start_engine(1, "good")
    updater = WeightUpdater([bad, good], bucket_bytes=100, timeout_s=4.0)
    updater.update(tensors(0).items(), "first")
    pid = bad.processes[0].pid
    stats = updater.update(WithEvent(tensors(1).items(), 8, lambda: os.kill(pid, signal.SIGSTOP)), 1)
    try:
        assert list(stats.quarantined) == ["engine 0 of 2 (bad)"]
        assert (good.version, bad.version, bad.paused) == ("1", "first", "abort")
        assert same_as_fresh(good, tensors(1))
        updater.update(tensors(2).items(), 2)
    finally:
        os.kill(pid, signal.SIGCONT)
    assert updater.readmit([good, bad], tensors(3).items(), 3).quarantined == {}
    assert same_as_fresh(bad, tensors(3))
    assert (bad.version, bad.paused) == ("3", None)
    updater.close()


@pytest.mark.parametrize(
    ("world_size", "killed", "mode"), [(1, 0, "function"), (2, 1, "function"), (2, 1, "collection")]
)
def test_killed_trainer_rank_leaves_engine_whole_or_paused(tmp_path, world_size, killed, mode):
    engine = ToyEngine(2)
    updater = WeightUpdater([engine])
    updater.update(tensors(0).items(), "before")
    updater.close()
    with trainers(world_size, str(tmp_path / "store"), killed, mode) as connection:
        outcome = serve(engine, connection)
        assert engine.version == "before"
        if killed == 0:
            assert outcome is None
        else:
            assert outcome is not None
            assert re.search(
                r"RankLostError: a trainer rank does not respond .*: rank 1 of 2 \(process \d+ on ", outcome
            ), outcome
        if mode == "collection":
            assert holds(engine, tensors(0))  # it was killed before any bucket was sent
            assert engine.paused is None
        elif killed > 0:
            cause = rf"(trainer rank [\d(),a-z ]*\b{killed} \(process|trainer rank {killed}: cannot open)"
            assert re.search(rf"engine 0 of 1 \(EngineProxy\): rank \d(, \d)*: .*{cause}", outcome), outcome
            if engine.paused is None:  # it was killed before the engine start_engine to load
                assert holds(engine, tensors(0))
            else:
                assert engine.paused == "abort"
    after = WeightUpdater([engine], bucket_bytes=300)  # a new trainer
    assert after.update(tensors(2).items(), "after").verified
    assert holds(engine, tensors(2))
    after.close()
