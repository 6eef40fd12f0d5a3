"""Engines that fail: reported errors, weights afterwards, and updates of the other engines."""

import re
import threading
import time

import pytest
import torch
from stock_engine import StockToyEngine
from tidemill_weight_update import WeightUpdater
from tidemill_weight_update.control.mailbox import COPIED, MIXED
from tidemill_weight_update.receive.receiver import Receiver
from tidemill_weight_update.receive.session import Peers
from toy_engines import MODES, ToyEngine, as_mode, holds, same, state, tensors


class BreakingEngine(ToyEngine):
    """Engine that fails at the step named by `broken`."""

    broken = ""

    def load(self, request, *, flush_cache):
        if self.broken == "down":
            raise ConnectionError("connection refused")
        super().load(request, flush_cache=flush_cache)
        if self.broken == "load":
            raise RuntimeError("no answer within 3 s")

    def set_weight_version(self, version):
        if self.broken == "version":
            raise RuntimeError("no answer within 4 s")
        super().set_weight_version(version)

    def get_weight_version(self):
        return "older" if self.broken == "reported" else super().get_weight_version()

    @property
    def has_loader(self):
        if self.broken == "loader":
            raise RuntimeError("cannot reach the server")
        return True

    def pause(self, mode):
        super().pause(mode)
        if self.broken == "pause":
            raise RuntimeError("cannot pause")

    def resume(self):
        super().resume()
        if self.broken == "resume":
            raise RuntimeError("cannot resume")


@pytest.mark.parametrize(
    ("broken", "message", "is_mixed"),
    [
        ("down", "connection refused", False),
        ("load", "no answer within 3 s", True),
        ("version", "no answer within 4 s", True),
        ("reported", "it reports version 'older', expected '2'", True),
        ("loader", "cannot reach the server", False),
        ("pause", "cannot pause", False),
        ("resume", "it was not resumed after its pause: cannot resume", None),
    ],
)
def test_failed_engine_is_quarantined_and_others_are_updated(broken, message, is_mixed):
    """`is_mixed`: whether it may hold a mix of versions; None if it holds the new version."""
    bad, good = BreakingEngine(2, "bad"), ToyEngine(1, "good")
    updater = WeightUpdater([bad, good], bucket_bytes=300, in_flight="retract")
    updater.update(tensors(1).items(), 1)
    bad.broken = broken
    stats = updater.update(tensors(2).items(), 2)
    assert stats.quarantined == {"engine 0 of 2 (bad)": message}
    assert holds(good, tensors(2))
    assert (good.version, good.paused) == ("2", None)
    if is_mixed:
        assert bad.paused == "abort"
    else:
        assert bad.paused is None  # also if it was paused but reported an error
        assert holds(bad, tensors(1 if is_mixed is False else 2))
    requests = len(bad.requests)
    assert updater.update(tensors(3).items(), 3).quarantined == {}  # it is skipped
    assert len(bad.requests) == requests
    bad.broken = ""
    assert updater.readmit([bad], tensors(3).items(), 3).quarantined == {}  # updated alone
    assert holds(bad, tensors(3))
    assert (bad.version, bad.paused) == ("3", None)
    updater.update(tensors(4).items(), 4)
    assert holds(bad, tensors(4))
    assert holds(good, tensors(4))
    updater.close()


def test_mixed_engine_is_paused_until_a_complete_update():
    bad, slow = BreakingEngine(2, "bad"), SlowEngine(1, "slow")
    updater = WeightUpdater([bad, slow])
    updater.update(tensors(1).items(), 1)
    bad.broken, slow.waits_for = "load", lambda: bad.paused
    stats = updater.update(tensors(2).items(), 2)
    assert list(stats.quarantined) == ["engine 0 of 2 (bad)"]
    assert slow.waited
    bad.broken = ""
    lacking = [item for item in tensors(3).items() if item[0] != "norm.weight"]
    with pytest.raises(RuntimeError, match="no tensor was sent"):
        updater.readmit([bad], lacking, 3)
    assert bad.paused == "abort"
    assert bad.calls.count("pause abort") == 1
    assert "resume" not in bad.calls
    assert updater.readmit([bad], tensors(3).items(), 3).quarantined == {}
    assert holds(bad, tensors(3))
    assert (bad.version, bad.paused) == ("3", None)
    updater.close()


def test_stats_sum_up_both_paths():
    both = WeightUpdater([StockToyEngine(), ToyEngine(2)], bucket_bytes=100)
    stats = both.update(tensors(1).items(), 1)
    alone = [WeightUpdater([engine], bucket_bytes=100) for engine in (StockToyEngine(), ToyEngine(2))]
    parts = [updater.update(tensors(1).items(), 1) for updater in alone]
    assert stats.num_tensors == len(tensors())
    assert stats.num_bytes == sum(part.num_bytes for part in parts) == 2 * parts[0].num_bytes
    assert stats.num_buckets == sum(part.num_buckets for part in parts) > parts[0].num_buckets
    for updater in (both, *alone):
        updater.close()


def test_failed_stock_engine_does_not_stop_fast_engines():
    stock, good = StockToyEngine(fail_at=0), ToyEngine(2, "good")
    updater = WeightUpdater([stock, good])
    stats = updater.update(tensors(1).items(), 1)
    assert list(stats.quarantined) == ["engine 0 of 2 (StockToyEngine)"]
    assert stock.calls[-1] == "pause abort"
    assert holds(good, tensors(1))
    assert (good.version, good.paused) == ("1", None)
    stock.fail_at = None
    assert updater.readmit([stock], tensors(2).items(), 2).quarantined == {}
    assert stock.version == "2"
    updater.close()


class SlowEngine(ToyEngine):
    """Engine whose load returns only after a condition is met."""

    waits_for = staticmethod(lambda: True)
    waited = False

    def load(self, request, *, flush_cache):
        super().load(request, flush_cache=flush_cache)
        end = time.monotonic() + 20
        while not self.waits_for() and time.monotonic() < end:
            time.sleep(0.01)
        self.waited = bool(self.waits_for())


class RaisingReceiver(Receiver):
    """Receiver whose rank 1 fails at the third bucket or while finishing."""

    fails = ""

    def copies(self, boxes, manifest):
        copies = super().copies(boxes, manifest)
        if self.fails == "copy" and self.model.rank == 1:
            copies.in_arena[0][2].run = fail
        return copies


def fail(*_: object) -> None:
    raise RuntimeError("out of memory")


def test_errors_of_pause_and_resume_are_both_reported():
    class Broken(BreakingEngine):
        broken = "pause"

        def resume(self):
            raise RuntimeError("cannot resume")

    message = r"^engine 0 of 1 \(toy\): cannot pause; it was not resumed after its pause: cannot resume$"
    with pytest.raises(RuntimeError, match=message):
        WeightUpdater([Broken(1)], in_flight="retract").update(tensors(1).items(), 1)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("where", ["copy", "finish"])
def test_failed_rank_of_an_engine_is_named(where, mode):
    bad, good = ToyEngine(2, "bad", receiver=RaisingReceiver), ToyEngine(2, "good")
    updater = WeightUpdater([good, bad], bucket_bytes=100)

    bad.receivers[1].fails = where  # type: ignore[attr-defined]
    if where == "finish":
        bad.receivers[1].finish = fail
    stats = updater.update(as_mode(tensors(1), mode), 1)
    (reason,) = stats.quarantined.values()
    assert list(stats.quarantined) == ["engine 1 of 2 (bad)"]
    assert "rank 0: RuntimeError: rank 1 of this engine failed" in reason
    assert "rank 1: RuntimeError: out of memory" in reason
    assert holds(good, tensors(1))
    assert (good.version, bad.version, bad.paused) == ("1", "first", "abort")
    updater.close()


def test_rank_that_fails_after_it_has_copied_does_not_stop_the_others(monkeypatch):
    def wait(peers, state, original=Peers._wait):
        if state == COPIED and peers.row == 1:
            raise OSError("the disk is gone")
        while state == COPIED and peers._control.state(peers._sequence, 1) != MIXED:
            time.sleep(0.01)
        original(peers, state)

    monkeypatch.setattr(Peers, "_wait", wait)
    updater = WeightUpdater([ToyEngine(2)])
    with pytest.raises(RuntimeError, match=r"^engine 0 of 1 \(toy\): rank 1: OSError: the disk is gone$"):
        updater.update(tensors(1).items(), 1)
    updater.close()


def test_restarted_engine_is_updated():
    engine = ToyEngine(2)
    updater = WeightUpdater([engine], bucket_bytes=300)
    updater.update(tensors(0).items(), 0)
    fresh = ToyEngine(4)  # new process: new model, new receivers, another tp_size
    engine.tp_size, engine.models, engine.receivers = 4, fresh.models, fresh.receivers
    updater.update(tensors(1).items(), 1)
    assert holds(engine, tensors(1))
    updater.close()


@pytest.mark.parametrize("size", [1, 3])
def test_client_with_wrong_tp_size_is_refused(size):
    engine, good = ToyEngine(2, "bad"), ToyEngine(1, "good")
    before = state(engine)
    engine.tp_size = size
    updater = WeightUpdater([engine, good], bucket_bytes=300)
    stats = updater.update(tensors(0).items(), 0)
    (reason,) = stats.quarantined.values()
    assert re.match(
        rf"rank 0(, 1)*(, 2)?: ValueError: the engine has 2 ranks, but its client reported tp_size={size}", reason
    ), reason
    assert same(state(engine), before)
    assert holds(good, tensors(0))
    updater.close()


class HangingEngine(ToyEngine):
    """Engine whose ranks do not handle requests until `may_continue` is set, as if their process was stopped."""

    client_timeout_s = 1.0

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.may_continue = threading.Event()

    def load(self, request, *, flush_cache):
        if not self.may_continue.wait(self.client_timeout_s):
            raise TimeoutError(f"no answer within {self.client_timeout_s} s")
        super().load(request, flush_cache=flush_cache)


@pytest.mark.parametrize(("client_timeout_s", "timeout_s"), [(6.0, 3.0), (1.0, 60.0)])
def test_hanging_engine_is_quarantined_and_others_are_updated(client_timeout_s, timeout_s):
    """The updater times out first, or the client does. The other engine must not, also on a slow machine."""
    hanging, good = HangingEngine(2, "hanging"), ToyEngine(2, "good")
    hanging.client_timeout_s = client_timeout_s
    updater = WeightUpdater([hanging, good], bucket_bytes=100, timeout_s=timeout_s)
    stats = updater.update(tensors(1).items(), 1)
    assert list(stats.quarantined) == ["engine 0 of 2 (hanging)"]
    assert holds(good, tensors(1))
    assert (good.version, hanging.version) == ("1", "first")
    hanging.may_continue.set()
    assert updater.readmit([hanging, good], tensors(2).items(), 2).quarantined == {}
    assert holds(hanging, tensors(2))
    updater.close()


def test_request_of_an_earlier_update_is_refused():
    """Neither its engine changes, nor the reports of another engine, which now has the same receiver row."""
    late, other = ToyEngine(1, "late"), ToyEngine(1, "other")
    updater = WeightUpdater([late], bucket_bytes=100)
    updater.update(tensors(0).items(), 0)
    (request,) = late.requests
    is_sending = False

    def items():
        for item in tensors(1).items():
            if is_sending:
                with pytest.raises(RuntimeError, match="the trainer cancelled update 1 before this engine started it"):
                    late.receivers[0].handle(request)
            yield item

    transfer = updater.declare(items)
    is_sending = True
    assert transfer.readmit([other], 1).verified
    assert other.requests[0].first_receiver == request.first_receiver
    assert holds(other, tensors(1))
    assert holds(late, tensors(0))
    updater.close()
    with pytest.raises(RuntimeError, match="cannot open the trainer's memory"):
        late.receivers[0].handle(request)


class StalledReceiver(Receiver):
    """Receiver that stalls at its first bucket until `may_continue` is set."""

    may_continue: threading.Event

    def copies(self, boxes, manifest):
        copies = super().copies(boxes, manifest)
        original = copies.in_arena[0][0].run

        def run(*args):
            self.may_continue.wait(20)
            original(*args)

        copies.in_arena[0][0].run = run
        return copies


class ImpatientEngine(ToyEngine):
    """Engine that times out after half a second while its receiver is stalled."""

    thread: threading.Thread

    def load(self, request, *, flush_cache):
        self.thread = threading.Thread(target=super().load, args=(request,), kwargs={"flush_cache": flush_cache})
        self.thread.start()
        is_stalled = not self.receivers[0].may_continue.is_set()  # type: ignore[attr-defined]
        self.thread.join(0.5 if is_stalled else None)
        if self.thread.is_alive():
            raise TimeoutError("no answer within 0.5 s")


def test_stalled_engine_that_resumes_in_a_later_update_does_not_disturb_it():
    stalled, other = ImpatientEngine(1, "stalled", receiver=StalledReceiver), ToyEngine(1, "other")
    stalled.receivers[0].may_continue = threading.Event()  # type: ignore[attr-defined]
    updater = WeightUpdater([stalled, other], bucket_bytes=100, timeout_s=20)
    assert "no answer within 0.5 s" in updater.update(tensors(0).items(), 0).quarantined["engine 0 of 2 (stalled)"]

    made = []

    def items():
        made.append(None)
        for count, item in enumerate(tensors(1).items()):
            yield item
            if count == 8 and len(made) == 2:
                stalled.receivers[0].may_continue.set()  # type: ignore[attr-defined]
                stalled.thread.join(10)
                assert not stalled.thread.is_alive()

    stats = updater.update(items, 1)
    assert (stats.verified, stats.quarantined) == (True, {})
    assert other.requests[1].first_receiver == stalled.requests[0].first_receiver
    assert holds(other, tensors(1))
    assert updater.readmit([stalled], tensors(2).items(), 2).verified
    assert holds(stalled, tensors(2))
    updater.close()


@pytest.mark.parametrize(
    ("in_flight", "calls"),
    [
        ("wait", ["load, flush", "finish", "version 1"]),
        ("abort", ["pause abort", "load, flush", "finish", "version 1", "resume"]),
        ("retract", ["pause retract", "load", "finish", "version 1", "resume"]),
        ("in_place", ["pause in_place", "load", "finish", "version 1", "resume"]),
    ],
)
def test_in_flight_mode_determines_pause_load_and_resume(in_flight, calls):
    engine = ToyEngine(1)
    updater = WeightUpdater([engine], in_flight=in_flight)
    updater.update(tensors().items(), 1)
    assert engine.calls == calls
    updater.close()


def test_kernel_that_cannot_be_loaded_is_reported_and_the_engine_keeps_its_weights(monkeypatch):
    """For example because Triton finds no C compiler."""
    cuda = pytest.importorskip("tidemill_weight_update.copy.cuda")

    class OnGpu(Receiver):
        def handle(self, request):
            self.device = torch.device("cuda")
            super().handle(request)

    def load_kernel(device):
        raise RuntimeError("failed to find C compiler")

    monkeypatch.setattr(cuda, "load_kernel", load_kernel)
    engine = ToyEngine(2, receiver=OnGpu)
    before = state(engine)
    updater = WeightUpdater([engine])
    with pytest.raises(RuntimeError, match="RuntimeError: failed to find C compiler"):
        updater.update(tensors(1).items(), 1)
    assert same(state(engine), before)
    updater.close()
