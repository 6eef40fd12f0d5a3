"""Ctrl-C while engines have loaded and not yet answered."""

import signal
import threading

import pytest
from tidemill_weight_update import WeightUpdater
from toy_engines import ToyEngine, holds, tensors


class Silent(ToyEngine):
    """Has done what it was asked for, and does not answer before `answers` is set. Interrupts the trainer once."""

    def __init__(self, *, loads: bool) -> None:
        super().__init__(2)
        self.loads = loads
        self.interrupts = False
        self.answers = threading.Event()

    def load(self, request, *, flush_cache):
        self.asked = request
        if not self.interrupts:
            return super().load(request, flush_cache=flush_cache)
        self.interrupts = False
        if self.loads:
            super().load(request, flush_cache=flush_cache)
        for seconds in (0.3,) if self.loads else (0.3, 0.8):  # the first tells the ranks, which would tell the trainer
            threading.Timer(seconds, signal.pthread_kill, (threading.main_thread().ident, signal.SIGINT)).start()
        assert self.answers.wait(20)


@pytest.fixture
def updated(ctrl_c):
    """An updater and its engine, which was updated once."""
    engine = Silent(loads=True)
    updater = WeightUpdater([engine], timeout_s=10)
    updater.update(tensors(0).items(), 0)
    yield updater, engine
    engine.answers.set()
    updater.close()


def test_an_engine_that_has_loaded_and_not_answered_is_fenced(updated):
    updater, engine = updated
    engine.interrupts = True
    with pytest.raises(KeyboardInterrupt):
        updater.update(tensors(1).items(), 1)
    assert engine.paused == "abort"
    assert engine.version == "0"
    engine.answers.set()
    assert updater.update(tensors(2).items(), 2).fenced == {}
    assert engine.paused is None
    assert engine.version == "2"
    assert holds(engine, tensors(2))


def test_an_engine_that_has_not_begun_goes_on_and_never_begins(updated):
    updater, engine = updated
    engine.interrupts, engine.loads = True, False
    with pytest.raises(KeyboardInterrupt):
        updater.update(tensors(1).items(), 1)
    assert engine.paused is None
    assert engine.version == "0"
    assert holds(engine, tensors(0))
    engine.answers.set()
    engine.load(engine.asked, flush_cache=False)  # late
    assert holds(engine, tensors(0))
