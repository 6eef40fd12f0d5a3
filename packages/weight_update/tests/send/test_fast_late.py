"""Engines that handle a request after it timed out: the request is refused, and the state of the engine is known."""

import asyncio
import threading

import pytest
from tidemill_weight_update import WeightUpdater
from tidemill_weight_update.control.board import LinkError
from tidemill_weight_update.control.mailbox import UNCHANGED, Mailbox
from tidemill_weight_update.receive.receiver import Receiver
from toy_engines import ToyEngine, holds, same, state, tensors

EXCLUDED = "the trainer excluded this rank"


class SilentEngine(ToyEngine):
    """Engine that keeps requests and does not answer."""

    error: BaseException = TimeoutError("no answer within 300 s")

    def load(self, request, *, flush_cache):
        self.requests.append(request)
        raise self.error


@pytest.mark.parametrize("others", [True, False])
def test_request_that_timed_out_is_refused_by_the_engine_later(others):
    """As when SGLang waits for a running request longer than the timeout of the client."""
    late = SilentEngine(1, "late")
    updater = WeightUpdater([late, ToyEngine(1, "good")] if others else [late])
    before = state(late)
    if others:
        assert list(updater.update(tensors(1).items(), 1).quarantined) == ["engine 0 of 2 (late)"]
    else:
        with pytest.raises(RuntimeError, match="no answer within 300 s"):
            updater.update(tensors(1).items(), 1)
    late.receivers[0].handle(late.requests[0])
    assert same(state(late), before)
    assert (late.paused, late.version) == (None, "first")
    box = updater._fast.mailbox
    assert (box.state(1, 0), box.reply(0)["error"].split(":")[:2]) == (UNCHANGED, ["RuntimeError", f" {EXCLUDED}"])
    updater.close()


def test_engine_that_starts_loading_just_before_its_timeout_is_paused(monkeypatch):
    late, good = SilentEngine(1, "late"), ToyEngine(1, "good")
    updater = WeightUpdater([late, good])

    def exclude(self, sequence, row, original=Mailbox.exclude):
        late.receivers[0].handle(late.requests[0])
        original(self, sequence, row)

    monkeypatch.setattr(Mailbox, "exclude", exclude)
    assert list(updater.update(tensors(1).items(), 1).quarantined) == ["engine 0 of 2 (late)"]
    assert holds(late, tensors(1))
    assert (late.paused, late.version) == ("abort", "first")
    updater.close()


class StallingReceiver(Receiver):
    """Receiver that stalls once until it is excluded, before it starts or at its first bucket."""

    stalls = ""
    is_excluded: threading.Event

    def stall(self, where):
        if self.stalls == where:
            self.stalls = ""
            assert self.is_excluded.wait(60)

    def handle(self, request):
        self.stall("begins")
        super().handle(request)

    def copies(self, boxes, manifest):
        copies = super().copies(boxes, manifest)
        original = copies.in_arena[0][0].run

        def run(*args):
            self.stall("reads")
            original(*args)

        copies.in_arena[0][0].run = run
        return copies


@pytest.mark.parametrize("where", ["begins", "reads"])
def test_rank_that_timed_out_does_not_wait_for_released_buckets(where, monkeypatch):
    late, good = ToyEngine(1, "late", receiver=StallingReceiver), ToyEngine(1, "good")
    first = WeightUpdater([late, good])  # the engines record their plans
    first.update(tensors(0).items(), 0)
    first.close()
    updater = WeightUpdater([late, good], bucket_bytes=100, timeout_s=3.0)
    late.receivers[0].stalls = where  # type: ignore[attr-defined]
    is_excluded = late.receivers[0].is_excluded = threading.Event()  # type: ignore[attr-defined]

    def exclude(self, sequence, row, original=Mailbox.exclude):
        original(self, sequence, row)
        is_excluded.set()

    monkeypatch.setattr(Mailbox, "exclude", exclude)
    quarantined = updater.update(tensors(1).items(), 1).quarantined
    assert list(quarantined) == ["engine 0 of 2 (late)"]
    assert quarantined["engine 0 of 2 (late)"].startswith(f"rank 0: RuntimeError: {EXCLUDED}")
    assert late.paused == (None if where == "begins" else "abort")
    assert holds(good, tensors(1))
    updater.close()


def test_engine_with_unreadable_state_is_paused(monkeypatch):
    """As over a broken link."""
    silent, good = SilentEngine(1, "silent"), ToyEngine(1, "good")
    updater = WeightUpdater([silent, good], timeout_s=30.0)

    def read(self, sequence, row, original=Mailbox.state):
        if row == 0 and threading.current_thread() is not threading.main_thread():
            raise LinkError("the store does not respond")
        return original(self, sequence, row)

    monkeypatch.setattr(Mailbox, "state", read)
    (why,) = updater.update(tensors(1).items(), 1).quarantined.values()
    assert why == ("no answer within 300 s; the state of its ranks cannot be read: the store does not respond")
    assert (silent.paused, silent.version) == ("abort", "first")
    assert holds(good, tensors(1))
    updater.close()


def test_cancelled_error_in_a_client_is_a_failure_of_that_engine():
    """`asyncio.CancelledError` is a BaseException."""
    cancelled, good = SilentEngine(1, "cancelled"), ToyEngine(1, "good")
    cancelled.error = asyncio.CancelledError()
    updater = WeightUpdater([cancelled, good])
    assert updater.update(tensors(1).items(), 1).quarantined == {"engine 0 of 2 (cancelled)": "CancelledError"}
    assert (cancelled.version, good.version) == ("first", "1")
    updater.close()


def engine_with_request_of_a_closed_updater() -> SilentEngine:
    """Engine that still has the first request of an updater that was closed."""
    late = SilentEngine(1, "late")
    first = WeightUpdater([late])
    with pytest.raises(RuntimeError, match="no answer within 300 s"):
        first.update(tensors(0).items(), "old")
    first.close()
    return late


def test_request_of_a_closed_updater_is_refused_during_the_next_updater():
    """The next updater has the same sequence number and reuses the file descriptor of the mailbox."""
    late = engine_with_request_of_a_closed_updater()
    (old,) = late.requests
    before = state(late)

    class Other(ToyEngine):
        def load(self, request, *, flush_cache):
            assert request.sequence == old.sequence
            assert request.mailboxes[0].partition("#")[0] == old.mailboxes[0].partition("#")[0]
            with pytest.raises(
                RuntimeError, match=r"memory /proc/\d+/fd/\d+ is closed \(its file descriptor was reused\)"
            ):
                late.receivers[0].handle(old)
            super().load(request, flush_cache=flush_cache)

    other = Other(1, "other")
    second = WeightUpdater([other])
    assert second.update(tensors(1).items(), "new").quarantined == {}
    assert holds(other, tensors(1))
    assert same(state(late), before)
    second.close()


@pytest.mark.parametrize("bucket_bytes", [1 << 20, 100])
def test_request_of_a_closed_updater_before_that_of_the_next_is_refused(bucket_bytes):
    """SGLang handles requests in order; errors in the loader do not stop it."""
    late = engine_with_request_of_a_closed_updater()
    (old,) = late.requests
    done: list[str] = []

    def load(request, *, flush_cache):
        with pytest.raises(RuntimeError, match=r"is closed \(its file descriptor was reused\)"):
            late.receivers[0].handle(old)
        done.append("refused")
        ToyEngine.load(late, request, flush_cache=flush_cache)

    late.load = load  # type: ignore[method-assign]
    second = WeightUpdater([late], bucket_bytes=bucket_bytes, timeout_s=5.0)
    stats = second.update(tensors(1).items(), "new")
    assert (stats.quarantined, done) == ({}, ["refused"])
    assert holds(late, tensors(1))
    assert (late.version, late.paused) == ("new", None)
    second.close()
