"""The engines of an updater and of one update, on the trainer rank that calls them."""

import logging
import threading
import time
from asyncio import CancelledError
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, get_args

from tidemill_weight_update.client import EngineClient, HoldingClient
from tidemill_weight_update.control.board import PollingWait
from tidemill_weight_update.control.descriptor import Request
from tidemill_weight_update.control.mailbox import IDLE, LOADED, UNCHANGED, Mailbox

_log = logging.getLogger(__name__)

InFlight = Literal["wait", "abort", "retract", "in_place"]
IN_FLIGHT: tuple[InFlight, ...] = get_args(InFlight)

CLIENT_ERRORS = (Exception, CancelledError)
"""Exceptions of a client that count as a failure of its engine. CancelledError is a BaseException; other BaseExceptions
(interrupts) propagate.
"""


@dataclass(slots=True)
class Member:
    """One engine in one update.

    Attributes:
        rows: rows of its ranks in the mailboxes; empty on the stock path.
        error: error message if it failed, else None.
        unchanged: whether it certainly holds the weights from before, all of one version.
        paused: whether it must be resumed at the end.
        stopped: whether it is paused because it may hold a mix of versions.
        holding: its client, if requests must be held back before `load` ends.
    """

    client: EngineClient
    name: str
    rows: range = range(0)
    error: str | None = None
    unchanged: bool = True
    paused: bool = False
    stopped: bool = False
    holding: HoldingClient | None = None
    replies: list[dict[str, Any]] = field(default_factory=list)

    def fail(self, error: str, *, unchanged: bool) -> None:
        """Take the engine out of the update; the first error is kept."""
        if self.error is None:
            self.error = error
        self.unchanged = self.unchanged and unchanged

    def attempt(self, action: Callable[[], object], *, unchanged: bool, what: str = "") -> None:
        """Call `action` unless the engine has failed; an exception marks it as failed, with `what` before its text."""
        if self.error is not None:
            return
        try:
            action()
        except CLIENT_ERRORS as error:
            self.fail(f"{what}{_text(error)}", unchanged=unchanged)

    def restore(self, action: Callable[[EngineClient], object], failure: str) -> bool:
        """Call `action` even if the engine has failed; return whether it succeeded, else add `failure` to the error."""
        try:
            action(self.client)
        except CLIENT_ERRORS as error:
            failure = f"{failure}: {_text(error)}"
            self.error = failure if self.error is None else f"{self.error}; {failure}"
            return False
        return True


class Fleet:
    """The engines that take part in one update. If one fails, the others continue.

    Engines with the tidemill loader are called after `connect`.

    Attributes:
        num_receivers: number of ranks of all engines with the tidemill loader.
        stock: members without the tidemill loader, as far as they responded.
        calls: load calls, in threads that wait for the responses.
    """

    def __init__(self, clients: Sequence[EngineClient], in_flight: InFlight) -> None:
        self._in_flight: InFlight = in_flight
        self._request: Request
        self._control: Mailbox
        self.members = [
            Member(client, f"engine {index} of {len(clients)} ({client!r})") for index, client in enumerate(clients)
        ]
        self.num_receivers = 0
        self.calls: list[threading.Thread] = []
        self._pauses: list[tuple[Member, threading.Thread]] = []
        for member in self.members:
            member.attempt(partial(self._assign_rows, member), unchanged=True)
        self.stock = [member for member in self.members if not member.rows and member.error is None]

    def _assign_rows(self, member: Member) -> None:
        if member.client.has_loader:
            member.rows = range(self.num_receivers, self.num_receivers + member.client.tp_size)
            self.num_receivers = member.rows.stop
            if self._in_flight == "wait" and isinstance(member.client, HoldingClient):
                member.holding = member.client

    @property
    def flushes(self) -> bool:
        """Whether prefix caches are flushed. SGLang cannot flush while requests are paused, and crashes if asked to."""
        return self._in_flight in ("wait", "abort")

    def pause(self, max_wait_s: float) -> None:
        """Pause the engines at the same time, unless running requests are waited for."""
        if (mode := self._in_flight) == "wait":
            return

        def pause(member: Member) -> None:
            member.attempt(lambda: member.client.pause(mode), unchanged=True)

        for member in self.members:
            if member.error is None:
                member.paused = True  # set before the call: SGLang pauses first, and may respond late or not at all
                if not member.stopped:  # pausing again would let SGLang start requests in between
                    self._pauses.append((member, _started(pause, member)))
        for member in _late(self._pauses, max_wait_s):
            member.fail(f"it did not pause within {max_wait_s:g} s; see its log", unchanged=True)

    def connect(self, request: Request, control: Mailbox) -> None:
        """Set what the engines with the tidemill loader receive, except for its rows, and where their ranks report."""
        self._request, self._control = request, control

    def load(self) -> None:
        """Call `load` of all engines with the tidemill loader, in threads."""
        for member in self.members:
            if member.rows and member.error is not None:
                self._exclude(member)
            elif member.rows:
                self.calls.append(_started(self._load, member))

    def exclude_all(self) -> None:
        """Exclude all engine ranks, so that other trainer ranks do not wait for engines that were not called."""
        for member in self.members:
            self._exclude(member)

    def hold(self, max_wait_s: float) -> None:
        """Hold back requests that wait for the end of `load`, for engines where they could start before `resume`."""
        held = [member for member in self.members if member.holding is not None and member.error is None]
        self._wait_until_started({row for member in held for row in member.rows}, max_wait_s)
        calls = []
        for member in held:
            if all(self._state(row) != IDLE for row in member.rows):
                calls.append((member, _started(_hold, member)))
            else:
                self._fail_late(
                    member,
                    f"its ranks did not start within {max_wait_s:g} s: requests are still running (increase timeout_s "
                    f'of WeightUpdater, or pass in_flight="abort" to end them), or the engine hangs or has exited (see '
                    f"its log)",
                )
        self.calls += [call for _, call in calls]
        for member in _late(calls, max_wait_s):
            self._fail_late(member, f"it did not hold back requests within {max_wait_s:g} s; see its log")

    def _wait_until_started(self, rows: set[int], max_wait_s: float) -> None:
        """Return when all of `rows` have started the update or never will, or after a timeout."""

        def drop_exited() -> None:
            rows.difference_update([row for row in rows if self._control.is_lost(self._request.sequence, row)])

        wait = PollingWait(max_wait_s, "engines to start", drop_exited)
        with suppress(TimeoutError):
            while rows := {row for row in rows if self._state(row) == IDLE}:
                wait.pause()

    def join(self) -> None:
        """Wait for the responses of the engines. An interrupt marks those that have not responded as failed."""
        try:
            for call in self.calls:
                call.join()
        except BaseException as error:
            for member in self.members:
                if member.rows and member.error is None and not member.replies:
                    why = f"the trainer was interrupted before the engine responded: {type(error).__name__}"
                    self._fail_and_exclude(member, why)
            raise

    def _state(self, row: int) -> int:
        return self._control.state(self._request.sequence, row)

    def _fail_late(self, member: Member, why: str) -> None:
        """Mark a late engine as failed; `_load` determines whether it changed anything when it returns."""
        member.fail(why, unchanged=True)
        self._exclude(member)

    def _load(self, member: Member) -> None:
        request = replace(self._request, first_receiver=member.rows.start, num_receivers=len(member.rows))
        try:
            member.client.load(request, flush_cache=self.flushes and member.holding is None)
            self._check_reports(member)
            if member.holding is not None:
                member.attempt(member.client.flush_cache, unchanged=False)
        except BaseException as error:  # noqa: BLE001 - otherwise the thread ends and the call looks successful
            self._fail_and_exclude(member, _text(error))
        if member.error is not None and not member.unchanged and not member.paused:  # at once: others may take long
            self._stop(member)

    def _fail_and_exclude(self, member: Member, why: str) -> None:
        """Exclude an engine whose client failed, and determine what it holds."""
        unchanged = False
        try:
            self._exclude(member)  # first: a rank that has not started by now never will
            unchanged = all(self._state(row) in (IDLE, UNCHANGED) for row in member.rows)
        except Exception as error:  # noqa: BLE001
            why = f"{why}; the state of its ranks cannot be read: {error}"
        member.fail(why, unchanged=unchanged)

    def _exclude(self, member: Member) -> None:
        for row in member.rows:
            self._control.exclude(self._request.sequence, row)

    def _check_reports(self, member: Member) -> None:
        states = [self._state(row) for row in member.rows]
        if not any(states):
            raise RuntimeError(
                "its ranks did not report: the loader refused the request (see the engine's log), for example because "
                "the engine runs on another machine and WeightUpdater has no link=GroupLink(...) to it, or has another "
                "version of this package"
            )
        errors: dict[str, list[str]] = {}
        for rank, (row, state) in enumerate(zip(member.rows, states, strict=True)):
            if state != LOADED:  # the reply of a rank that has not reported is that of an earlier update
                reply = self._control.reply(row) if state else {}
                errors.setdefault(reply.get("error", "it did not finish"), []).append(str(rank))
        if errors:
            raise RuntimeError("; ".join(f"rank {', '.join(ranks)}: {error}" for error, ranks in errors.items()))
        member.replies = [self._control.reply(row) for row in member.rows]
        member.unchanged = False

    def fail_changed(self, why: str) -> None:
        """Mark engines that may have changed as failed: the update was aborted, so their contents are undefined."""
        for member in self.members:
            if member.error is None and not member.unchanged:
                member.fail(why, unchanged=False)

    def outcome(self) -> dict[str, Any]:
        """Return the result of the update: entries of `UpdateStats`, and "all_failed"."""
        replies = [reply for member in self.members for reply in member.replies]
        return {
            "quarantined": {member.name: member.error for member in self.members if member.error is not None},
            "all_failed": all(member.error is not None for member in self.members),
            "through_loader": {name: why for reply in replies for name, why in reply["through_loader"].items()},
            "num_unverified": max((reply["num_unverified"] for reply in replies), default=0),
            "engine_s": _slowest([reply["seconds"] for reply in replies]),
            "verified": all(member.replies for member in self.members if member.error is None),
        }

    def failures(self) -> list[str]:
        """Return the names and errors of the engines that failed."""
        return [f"{member.name}: {member.error}" for member in self.members if member.error is not None]

    def make_visible(self, version: str, *, unchanged: bool = False) -> None:
        """Set the version on all engines that loaded everything; `unchanged`: whether that was only an adapter."""

        def set_and_check(member: Member) -> None:
            member.client.set_weight_version(version)
            reported = member.client.get_weight_version()
            if reported != version:
                raise RuntimeError(f"it reports version {reported!r}, expected {version!r}")

        for member in self.members:
            member.attempt(partial(set_and_check, member), unchanged=unchanged)

    def resume(self) -> None:
        """Resume paused engines, and pause those that may hold a mix of versions."""
        for _, call in self._pauses:  # a late pause would follow the end of it
            call.join()
        for member in self.members:
            if member.error is not None and not member.unchanged:
                self._stop(member)
            elif member.paused:
                member.restore(lambda client: client.resume(), "it was not resumed after its pause")

    def _stop(self, member: Member) -> None:
        if not member.stopped:
            member.stopped = member.restore(lambda client: client.pause("abort"), "pausing it failed too")


def _text(error: BaseException) -> str:
    return str(error) or type(error).__name__


def _started(action: Callable[[Member], None], member: Member) -> threading.Thread:
    """Call `action` in another thread."""
    call = threading.Thread(target=action, args=(member,), daemon=True)
    call.start()
    return call


def _late(calls: Sequence[tuple[Member, threading.Thread]], max_wait_s: float) -> list[Member]:
    """Wait for calls of engines, and return the engines whose call has not returned."""
    deadline = time.monotonic() + max_wait_s
    for _, call in calls:
        call.join(max(0.0, deadline - time.monotonic()))
    return [member for member, call in calls if call.is_alive()]


def _hold(member: Member) -> None:
    if member.holding is not None and member.error is None:
        member.paused = True  # set before the call, so that an interrupt in between does not leave it paused
        member.attempt(member.holding.hold, unchanged=False)


def _slowest(seconds: Sequence[dict[str, float]]) -> dict[str, float]:
    """Return the largest value of each stage."""
    return {stage: max(each.get(stage, 0.0) for each in seconds) for stage in sorted({s for e in seconds for s in e})}


class Engines:
    """Engines of an updater. One that fails is excluded until it is readmitted."""

    def __init__(self, clients: Sequence[EngineClient]) -> None:
        self._clients = distinct(clients)
        self._excluded: dict[int, Member] = {}  # by id of the client, which the member keeps alive
        self._on_stock_path: set[str] = set()

    def fleet(self, in_flight: InFlight, readmitted: Sequence[EngineClient] | None = None) -> Fleet:
        """Return the engines of an update.

        Args:
            readmitted: engines that are updated although they may be excluded or new, and resumed afterwards. None:
                all that are not excluded.
        """
        chosen = [client for client in self._clients if id(client) not in self._excluded]
        if readmitted is not None:
            chosen = distinct(readmitted)
        elif self._clients and not chosen:
            why = "; ".join(f"{member.name}: {member.error}" for member in self._excluded.values())
            raise RuntimeError(f"all engines are excluded because they failed; call readmit() for them. {why}")
        if not chosen:
            raise ValueError("expected at least one engine on rank 0, got none; pass engine clients as engines=[...]")
        fleet = Fleet(chosen, in_flight)
        for name in {repr(member.client) for member in fleet.stock} - self._on_stock_path:
            self._on_stock_path.add(name)
            _log.warning(
                "%s was launched without sglang_launch_args(): it is updated through SGLang's own loader, which is "
                "slower, checks little and verifies nothing",
                name,
            )
        for member in fleet.members if readmitted is not None else []:
            member.paused = True
            if failed := self._excluded.get(id(member.client)):
                member.unchanged, member.stopped = failed.unchanged, failed.stopped
        return fleet

    def excluded(self, fleet: Fleet) -> dict[str, str]:
        """Return names and errors of the excluded engines that did not take part in an update."""
        taken = {id(member.client) for member in fleet.members}
        return {member.name: member.error or "" for key, member in self._excluded.items() if key not in taken}

    def record(self, fleet: Fleet, *, is_complete: bool) -> None:
        """Exclude the engines that failed, unless all refused the update and none changed; include the others.

        Args:
            is_complete: whether the trainer sent everything.
        """
        others = is_complete and any(member.error is None for member in fleet.members)
        for member in fleet.members:
            key = id(member.client)
            if member.error is not None:
                if others or not member.unchanged or key in self._excluded:
                    self._excluded[key] = member
            elif is_complete:
                self._excluded.pop(key, None)
                if not any(member.client is client for client in self._clients):
                    self._clients.append(member.client)


def distinct(engines: Sequence[EngineClient]) -> list[EngineClient]:
    """Return the engines as a list."""
    if not isinstance(engines, Sequence):
        raise TypeError(f"engines must be a list of engine clients, got {engines!r}")
    for index, engine in enumerate(engines):
        if "has_loader" not in dir(engine):  # hasattr would call the property, which contacts a server
            raise TypeError(
                f"expected an engine client as engine {index} of {len(engines)}, got {engine!r}; pass "
                f"LocalEngine(engine), HttpEngine(url), or an object with the members of EngineClient"
            )
        if any(engine is other for other in engines[:index]):
            raise ValueError(f"engine {index} of {len(engines)} ({engine!r}) is listed twice; pass each engine once")
    return list(engines)
