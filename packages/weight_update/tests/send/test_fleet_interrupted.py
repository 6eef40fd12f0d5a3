"""Ctrl-C while engines load; cancelled calls."""

import asyncio
import signal
import threading

import pytest
from tidemill_weight_update import WeightUpdater
from toy_engines import ToyEngine, holds, tensors


class SilentEngine(ToyEngine):
    """Engine that loads, interrupts the trainer once, and does not answer before `may_answer` is set."""

    def __init__(self, *, loads: bool) -> None:
        super().__init__(2)
        self.loads = loads
        self.interrupts = False
        self.may_answer = threading.Event()

    def load(self, request, *, flush_cache):
        self.last_request = request
        if not self.interrupts:
            return super().load(request, flush_cache=flush_cache)
        self.interrupts = False
        if self.loads:
            super().load(request, flush_cache=flush_cache)
        for seconds in (0.3,) if self.loads else (0.3, 0.8):  # after the first, ranks report an error
            threading.Timer(seconds, signal.pthread_kill, (threading.main_thread().ident, signal.SIGINT)).start()
        assert self.may_answer.wait(20)


@pytest.fixture
def updated(ctrl_c):
    """An updater and its engine, after one update."""
    engine = SilentEngine(loads=True)
    updater = WeightUpdater([engine], timeout_s=10)
    updater.update(tensors(0).items(), 0)
    yield updater, engine
    engine.may_answer.set()
    updater.close()


def test_interrupted_engine_that_has_loaded_is_quarantined(updated):
    updater, engine = updated
    engine.interrupts = True
    with pytest.raises(KeyboardInterrupt):
        updater.update(tensors(1).items(), 1)
    assert engine.paused == "abort"
    assert engine.version == "0"
    engine.may_answer.set()
    assert updater.readmit([engine], tensors(2).items(), 2).quarantined == {}
    assert engine.paused is None
    assert engine.version == "2"
    assert holds(engine, tensors(2))


def test_interrupted_engine_that_has_not_started_never_loads(updated):
    updater, engine = updated
    engine.interrupts, engine.loads = True, False
    with pytest.raises(KeyboardInterrupt):
        updater.update(tensors(1).items(), 1)
    assert engine.paused is None
    assert engine.version == "0"
    assert holds(engine, tensors(0))
    engine.may_answer.set()
    engine.load(engine.last_request, flush_cache=False)  # late
    assert holds(engine, tensors(0))


class RaisingEngine(ToyEngine):
    """Engine that raises `raises[method]` once in each of these methods."""

    def __init__(self, name: str) -> None:
        super().__init__(1, name)
        self.raises: dict[str, BaseException] = {}

    def _raise(self, where: str) -> None:
        if where in self.raises:
            raise self.raises.pop(where)

    def pause(self, mode):
        self._raise(f"pause {mode}")
        super().pause(mode)

    def resume(self):
        self._raise("resume")
        super().resume()

    def set_weight_version(self, version):
        self._raise("set_weight_version")
        super().set_weight_version(version)

    def get_weight_version(self):
        self._raise("get_weight_version")
        return super().get_weight_version()


@pytest.fixture
def pair():
    """An updater that pauses its engines, and its two engines, after one update."""
    engines = RaisingEngine("first"), ToyEngine(2, "second")
    updater = WeightUpdater(engines, in_flight="retract")
    updater.update(tensors(0).items(), 0)
    yield updater, *engines
    updater.close()


def update_works(updater, *engines) -> bool:
    """Whether a readmission updates and resumes them."""
    updater.readmit(engines, tensors(2).items(), 2)
    return all((engine.paused, engine.version) == (None, "2") and holds(engine, tensors(2)) for engine in engines)


@pytest.mark.parametrize("where", ["pause retract", "set_weight_version", "get_weight_version", "resume"])
def test_cancelled_error_in_one_client_quarantines_that_engine(pair, where):
    updater, first, second = pair
    first.raises = {where: asyncio.CancelledError()}
    (reason,) = updater.update(tensors(1).items(), 1).quarantined.values()
    assert "CancelledError" in reason
    assert (second.paused, second.version) == (None, "1")
    assert holds(second, tensors(1))
    assert update_works(updater, first, second)
