"""Engines that could start requests between a load and the flush after it are held before the load ends."""

import re
import threading
import time

import pytest
from tidemill_weight_update import WeightUpdater
from tidemill_weight_update.receive.receiver import Receiver
from toy_engines import ToyEngine, holds, same, state, tensors


class HeldEngine(ToyEngine):
    """Engine that records its calls. `hold` first calls `delay`; `broken` names the call that fails."""

    broken = ""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.is_loaded = threading.Event()
        self.delay = lambda: None

    def hold(self) -> None:
        self.calls.append(f"hold with {len(self.started_receivers)} of {self.tp_size}")
        self.delay()
        if self.broken == "hold":
            raise RuntimeError("no answer within 3 s")
        self.paused = "held"
        self.calls.append("held")

    @property
    def started_receivers(self) -> list[Receiver]:
        return [receiver for receiver in self.receivers if getattr(receiver, "has_started", False)]

    def load(self, request, *, flush_cache):
        super().load(request, flush_cache=flush_cache)
        self.calls.append("loaded")
        self.is_loaded.set()

    def flush_cache(self) -> None:
        if self.broken == "flush":
            raise RuntimeError("requests still run")
        self.calls.append("flush")


class LateReceiver(Receiver):
    """Receiver whose rank 1 calls `delay` before it starts."""

    has_started = False

    def __init__(self, *args):
        super().__init__(*args)
        self.delay = lambda: time.sleep(0.3)

    def handle(self, request):
        if self.model.rank == 1:
            self.delay()
        self.has_started = True
        super().handle(request)


@pytest.mark.parametrize("mode", ["collection", "function"])
def test_engine_is_held_after_all_ranks_started_and_before_any_finishes(mode):
    engine, other = HeldEngine(2, receiver=LateReceiver), ToyEngine(2)
    engine.delay = lambda: time.sleep(0.3)
    updater = WeightUpdater([other, engine], bucket_bytes=100)
    items = tensors(1).items()
    assert updater.update(list(items) if mode == "collection" else lambda: iter(list(items)), 1).verified
    calls = [call for call in engine.calls if call != "finish"]
    assert calls == ["load", "hold with 2 of 2", "held", "loaded", "flush", "version 1", "resume"]
    assert engine.calls.index("held") < engine.calls.index("finish")
    assert [call for call in other.calls if call != "finish"] == ["load, flush", "version 1"]
    assert holds(engine, tensors(1))
    assert holds(other, tensors(1))
    updater.close()


@pytest.mark.parametrize("in_flight", ["abort", "retract", "in_place"])
def test_paused_engine_is_not_held(in_flight):
    engine = HeldEngine(1)
    updater = WeightUpdater([engine], in_flight=in_flight)
    updater.update(tensors(1).items(), 1)
    load = "load, flush" if in_flight == "abort" else "load"
    assert engine.calls == [f"pause {in_flight}", load, "finish", "loaded", "version 1", "resume"]
    updater.close()


@pytest.mark.parametrize(("broken", "why"), [("hold", "no answer within 3 s"), ("flush", "requests still run")])
def test_engine_that_fails_to_hold_or_flush_is_quarantined_and_paused(broken, why):
    bad, good = HeldEngine(2, "bad"), HeldEngine(1, "good")
    bad.broken = broken
    updater = WeightUpdater([bad, good], bucket_bytes=100)
    assert updater.update(tensors(1).items(), 1).quarantined == {"engine 0 of 2 (bad)": why}
    assert (bad.paused, bad.version, good.paused, good.version) == ("abort", "first", None, "1")
    bad.broken = ""
    assert updater.readmit([bad], tensors(2).items(), 2).quarantined == {}
    assert holds(bad, tensors(2))
    assert (bad.paused, bad.version) == (None, "2")
    updater.close()


@pytest.mark.parametrize("delayed", ["its ranks did not start", "it did not hold back requests"])
def test_engine_that_is_late_is_quarantined_and_others_are_updated(delayed):
    late, good = HeldEngine(2, "late", receiver=LateReceiver), HeldEngine(1, "good")
    part = late if delayed == "it did not hold back requests" else late.receivers[1]
    part.delay = lambda: good.is_loaded.wait(60)  # which needs that nobody waits for `late` any more
    before = state(late)
    updater = WeightUpdater([late, good], bucket_bytes=1 << 20, timeout_s=2)
    why = updater.update(tensors(1).items(), 1).quarantined["engine 0 of 2 (late)"]
    assert re.fullmatch(rf"{delayed} within 2 s.*see its log\)?", why)
    assert holds(good, tensors(1))
    assert (good.version, good.paused, late.version) == ("1", None, "first")
    assert late.paused == "abort" or same(state(late), before)  # depends on what reached its rank
    updater.close()


def test_engine_that_refuses_the_update_keeps_running():
    """Both if it was already held and if it was not."""
    engine = HeldEngine(2)
    updater = WeightUpdater([engine], bucket_bytes=100)
    updater.update(tensors(1).items(), 1)
    items = tensors(2)
    del items["norm.weight"]
    with pytest.raises(RuntimeError, match=r"no tensor was sent .*'norm"):
        updater.update(items.items(), 2)
    assert holds(engine, tensors(1))
    assert (engine.version, engine.paused) == ("1", None)
    updater.close()


class ExitedEngine(HeldEngine):
    """Engine whose process exits before its ranks start."""

    def load(self, request, *, flush_cache):
        time.sleep(0.2)
        raise ConnectionError("the server has ended")


def test_engine_that_exits_before_it_starts_is_not_waited_for():
    gone, good = ExitedEngine(1, "gone"), HeldEngine(1, "good")
    updater = WeightUpdater([gone, good])
    assert updater.update(tensors(1).items(), 1).quarantined == {"engine 0 of 2 (gone)": "the server has ended"}
    assert gone.calls == []
    assert holds(good, tensors(1))
    updater.close()
