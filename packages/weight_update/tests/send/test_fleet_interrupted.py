"""Ctrl-C while engines load, are paused or are resumed; cancelled calls."""

import asyncio
import signal
import sys
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
    assert updater.update(tensors(2).items(), 2).quarantined == {}
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
    """Whether an update that names all engines updates and resumes them."""
    updater.update(tensors(2).items(), 2, engines=engines)
    return all((engine.paused, engine.version) == (None, "2") and holds(engine, tensors(2)) for engine in engines)


def test_interrupt_in_resume_of_one_engine_does_not_keep_others_paused(pair):
    updater, first, second = pair
    first.raises = {"resume": KeyboardInterrupt()}
    with pytest.raises(KeyboardInterrupt):
        updater.update(tensors(1).items(), 1)
    assert (second.paused, second.version) == (None, "1")
    assert first.paused == "retract"
    requests = len(first.requests)
    updater.update(tensors(1).items(), 1)
    assert len(first.requests) == requests  # quarantined
    assert update_works(updater, first, second)


def test_second_interrupt_leaves_every_engine_paused_or_quarantined(pair):
    updater, first, second = pair
    first.raises = {"get_weight_version": KeyboardInterrupt("one"), "pause abort": KeyboardInterrupt("two")}
    with pytest.raises(KeyboardInterrupt, match="two") as caught:
        updater.update(tensors(1).items(), 1)
    assert str(caught.value.__context__) == "one"
    assert (second.paused, second.version) == ("abort", "0")
    with pytest.raises(ValueError, match="failed in update"):
        updater.update({"temperature": tensors(1)["temperature"]}.items(), 1, partial=True)
    with pytest.raises(ValueError, match="an empty iterable"):
        updater.update([], 1)
    assert first.paused == "abort"  # the pause that failed is repeated
    assert update_works(updater, first, second)


@pytest.mark.parametrize("where", ["pause retract", "set_weight_version", "get_weight_version", "resume"])
def test_cancelled_error_in_one_client_quarantines_that_engine(pair, where):
    updater, first, second = pair
    first.raises = {where: asyncio.CancelledError()}
    (reason,) = updater.update(tensors(1).items(), 1).quarantined.values()
    assert "CancelledError" in reason
    assert (second.paused, second.version) == (None, "1")
    assert holds(second, tensors(1))
    assert update_works(updater, first, second)


class InterruptAtLine:
    """Trace function that raises KeyboardInterrupt at line number `at` of those executed while a thread starts."""

    def __init__(self, at: int) -> None:
        self.left = at

    def __call__(self, frame, event, arg):
        if frame.f_code.co_name != "_start" or not frame.f_code.co_filename.endswith("fleet.py"):
            return None
        sys.settrace(self.within)
        return self.line

    def within(self, frame, event, arg):
        return self.line if frame.f_code.co_qualname == "Thread.start" else None

    def line(self, frame, event, arg):
        lock = threading._active_limbo_lock  # type: ignore[attr-defined]
        if event == "line" and not lock._is_owned():  # Python itself is not safe here
            self.left -= 1
            if self.left < 0:
                sys.settrace(None)
                raise KeyboardInterrupt
        elif event == "return" and frame.f_code.co_name == "_start":
            sys.settrace(None)
        return self.line


def test_interrupt_at_any_line_of_a_thread_start_leaves_no_call_running():
    engine = ToyEngine(1)
    updater = WeightUpdater([engine])
    updater.update(tensors(0).items(), 0)
    for at in range(200):
        before = set(threading.enumerate())
        tracing = InterruptAtLine(at)
        sys.settrace(tracing)
        try:
            updater.update(tensors(1).items(), 1)
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(None)
        if tracing.left >= 0:
            break
        for thread in set(threading.enumerate()) - before:
            if thread.ident is not None:
                thread.join(5)
                assert not thread.is_alive()
        assert engine.version == "0"
        assert engine.paused == "abort" or (engine.paused is None and holds(engine, tensors(0)))
        updater.update(tensors(0).items(), 0)
        assert (engine.paused, holds(engine, tensors(0))) == (None, True)
    assert at > 8
    assert (engine.version, holds(engine, tensors(1))) == ("1", True)
    updater.close()
