"""The engines of an update, on the trainer rank that talks to them."""

import threading
import time
from asyncio import CancelledError
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from tidemill_weight_update.client import EngineClient, HoldingClient
from tidemill_weight_update.control.channel import Channel
from tidemill_weight_update.control.mailbox import IDLE, LOADED, UNCHANGED
from tidemill_weight_update.control.readers import Readers
from tidemill_weight_update.control.request import Request

InFlight = Literal["wait", "abort", "retract", "in_place"]
IN_FLIGHT: tuple[InFlight, ...] = get_args(InFlight)

CLIENT_ERRORS = (Exception, CancelledError)
"""Whatever a client raises is its failure. Asyncio's error is no `Exception`; what else is none, interrupts us."""


@dataclass(slots=True)
class Member:
    """One engine in one update.

    Attributes:
        name: for messages.
        rows: of its ranks in the mailboxes; empty on the stock path.
        error: why it failed; None: it has not.
        unchanged: whether it surely holds the weights that it held before, all of one version.
        paused: whether it is to go on in the end.
        stopped: whether it is paused since it may hold a mix of versions.
        holding: its client, if that has to hold requests back before `load` ends.
        replies: what its ranks reported.
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
        """Takes the engine out of the update; the first reason counts."""
        if self.error is None:
            self.error = error
        self.unchanged = self.unchanged and unchanged

    def attempt(self, action: Callable[[], object], *, unchanged: bool) -> None:
        """Calls `action`, unless the engine has failed; an exception is its failure."""
        if self.error is not None:
            return
        try:
            action()
        except CLIENT_ERRORS as error:
            self.fail(str(error) or type(error).__name__, unchanged=unchanged)


class Fleet:
    """The engines that take part in one update. One that fails drops out, the others go on.

    Args:
        clients: the engines.
        in_flight: what becomes of running requests: "wait" lets them end, the others are SGLang's modes of pausing.

    Attributes:
        stock: those of the members that are without our loader, as far as they could tell.
        calls: of engines, in threads that wait for their answers.
    """

    def __init__(self, clients: Sequence[EngineClient], in_flight: InFlight) -> None:
        self._in_flight: InFlight = in_flight
        self.members = [
            Member(client, f"engine {index} of {len(clients)} ({client!r})") for index, client in enumerate(clients)
        ]
        self.num_receivers = 0
        self.calls: list[Future[None]] = []
        for member in self.members:
            member.attempt(lambda member=member: self._assign_rows(member), unchanged=True)
        self.stock = [member for member in self.members if not member.rows and member.error is None]

    def _assign_rows(self, member: Member) -> None:
        if member.client.has_loader:
            end = self.num_receivers + member.client.tp_size
            member.rows = range(self.num_receivers, end)
            self.num_receivers = end
            if self._in_flight == "wait" and isinstance(member.client, HoldingClient):
                member.holding = member.client

    @property
    def flushes(self) -> bool:
        """Whether prefix caches are emptied. SGLang cannot while requests are paused, and ends if it is asked to."""
        return self._in_flight in ("wait", "abort")

    def pause(self) -> None:
        """Pauses the engines, unless running requests are to be waited for."""
        mode = self._in_flight
        if mode == "wait":
            return
        for member in self.members:
            if member.error is not None:
                continue
            member.paused = True  # before it is: SGLang pauses first, and may answer too late or not at all
            if not member.stopped:  # SGLang would let requests begin before it pauses again
                member.attempt(lambda member=member: member.client.pause(mode), unchanged=True)

    def load(self, request: Callable[[Member], Request], control: Channel) -> None:
        """Asks all engines with our loader to load."""
        for member in self.members:
            if not member.rows:
                continue
            asked = request(member)
            if member.error is not None:
                self._exclude(member, asked.sequence, control)
                continue
            self._start(self._load, member, asked, control)

    def exclude(self, sequence: int, control: Channel) -> None:
        """Tells the other trainer ranks that no engine was asked."""
        for row in range(self.num_receivers):
            control.exclude(sequence, row)

    def hold(self, sequence: int, control: Channel, readers: Readers) -> None:
        """Holds back the requests that wait for the end of `load`, where they could begin before `resume`."""
        held = [member for member in self.members if member.holding is not None and member.error is None]
        if not held:
            return
        readers.wait_until_started(row for member in held for row in member.rows)
        calls = []
        for member in held:
            if all(control.state(sequence, row) != IDLE for row in member.rows):
                calls.append((member, self._start(_hold, member)))
            else:
                self._fail_late(member, "its ranks did not begin in time", sequence, control)
        deadline = time.monotonic() + readers.max_wait_s
        for member, call in calls:
            wait([call], max(0.0, deadline - time.monotonic()))
            if not call.done():
                self._fail_late(member, "it did not hold back requests in time", sequence, control)

    def join(self, sequence: int, control: Channel) -> None:
        """Waits for the answers of the engines. An interrupt gives up those that have not answered."""
        try:
            for call in self.calls:
                if not call.cancelled():
                    call.result()
        except BaseException as error:
            for member in self.members:
                if member.rows and member.error is None and not member.replies:
                    why = f"the trainer was interrupted before the engine answered: {type(error).__name__}"
                    self._fail_and_exclude(member, why, sequence, control)
            raise

    def _fail_late(self, member: Member, why: str, sequence: int, control: Channel) -> None:
        """Whether it has changed anything, `_load` says when it ends."""
        member.fail(why, unchanged=True)
        self._exclude(member, sequence, control)

    def _start(self, action: Callable[..., None], *args: object) -> Future[None]:
        """Calls in another thread. Wherever an interrupt comes, either the call never begins, or it is waited for."""
        call: Future[None] = Future()
        try:
            self.calls.append(call)
            threading.Thread(target=_run_call, args=(call, action, *args), daemon=True).start()
        except BaseException:
            call.cancel()  # unless it has begun
            raise
        return call

    def _load(self, member: Member, request: Request, control: Channel) -> None:
        try:
            member.client.load(request, flush_cache=self.flushes and member.holding is None)
            self._check_reports(member, request.sequence, control)
            if member.holding is not None:
                member.attempt(member.client.flush_cache, unchanged=False)
        except BaseException as error:  # noqa: BLE001 - it would end this thread, and pass for a success
            self._fail_and_exclude(member, str(error) or type(error).__name__, request.sequence, control)
        if member.error is not None and not member.unchanged and not member.paused:  # now, as others may take long
            self._stop(member)

    def _fail_and_exclude(self, member: Member, why: str, sequence: int, control: Channel) -> None:
        """Gives up an engine whose client has, and finds out what it holds."""
        unchanged = False
        try:
            self._exclude(member, sequence, control)  # first: a rank that has not begun by now never does
            unchanged = all(control.state(sequence, row) in (IDLE, UNCHANGED) for row in member.rows)
        except Exception as error:  # noqa: BLE001
            why = f"{why}; nor can its ranks be asked what they hold: {error}"
        member.fail(why, unchanged=unchanged)

    def _exclude(self, member: Member, sequence: int, control: Channel) -> None:
        for row in member.rows:
            control.exclude(sequence, row)

    def _check_reports(self, member: Member, sequence: int, control: Channel) -> None:
        states = [control.state(sequence, row) for row in member.rows]
        if not any(states):
            raise RuntimeError(
                "its ranks did not report: the loader refused the request (the engine's log says why), for example "
                "because the engine was launched with another TIDEMILL_WEIGHT_TOKEN, or runs on another machine and "
                "WeightUpdater has no link=GroupLink(...) that leads there"
            )
        # What stands there of a rank that has not reported is of an earlier update.
        replies = [control.reply(row) if state else {} for row, state in zip(member.rows, states, strict=True)]
        told: dict[str, list[str]] = {}
        for rank, (state, reply) in enumerate(zip(states, replies, strict=True)):
            if state != LOADED:
                told.setdefault(reply.get("error", "it did not come to the end"), []).append(str(rank))
        if told:
            raise RuntimeError("; ".join(f"rank {', '.join(ranks)}: {error}" for error, ranks in told.items()))
        member.replies = replies
        member.unchanged = False

    def fail_changed(self, why: str) -> None:
        """The update ends before its end: engines that may have changed something hold what nobody can tell."""
        for member in self.members:
            if member.error is None and not member.unchanged:
                member.fail(why, unchanged=False)

    def outcome(self) -> dict[str, Any]:
        """What became of the update: entries of `UpdateStats`, and "all_failed"."""
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
        """The engines that failed, and why."""
        return [f"{member.name}: {member.error}" for member in self.members if member.error is not None]

    def make_visible(self, version: str, *, everywhere: bool = False) -> None:
        """Makes the version visible on all engines that have loaded everything.

        Args:
            everywhere: also on those of the stock path, which else have it from their last bucket; they have all got an
                adapter, and hold the weights that they held before.
        """
        for member in self.members:
            if member.rows or everywhere:
                member.attempt(lambda member=member: member.client.set_weight_version(version), unchanged=everywhere)
            member.attempt(lambda member=member: _check_version(member.client, version), unchanged=everywhere)

    def resume(self) -> None:
        """Lets paused engines go on, and stops those that may hold a mix of versions.

        An interrupt is raised when all have had their turn; that of one engine may have been cut short.
        """
        interrupts: list[BaseException] = []
        for member in self.members:
            try:
                if member.error is not None and not member.unchanged:
                    self._stop(member)
                elif member.paused:
                    _resume(member)
            except BaseException as error:  # noqa: BLE001 - raised below
                why = f"the trainer was interrupted before it was paused or went on: {type(error).__name__}"
                member.fail(why, unchanged=member.unchanged)
                interrupts.append(error)
        if interrupts:
            raise interrupts[0]

    def _stop(self, member: Member) -> None:
        if member.stopped:
            return
        try:
            member.client.pause("abort")
            member.stopped = True
        except CLIENT_ERRORS as error:
            member.error = f"{member.error}; nor could it be paused: {str(error) or type(error).__name__}"


def _resume(member: Member) -> None:
    try:
        member.client.resume()
    except CLIENT_ERRORS as error:
        told = f"it did not go on after its pause: {str(error) or type(error).__name__}"
        member.error = told if member.error is None else f"{member.error}; {told}"


def _run_call(call: Future[None], action: Callable[..., None], *args: object) -> None:
    if call.set_running_or_notify_cancel():
        try:
            action(*args)
        finally:
            call.set_result(None)


def _hold(member: Member) -> None:
    if member.holding is not None and member.error is None:
        member.paused = True  # before it is: nothing that comes in between may leave it so
        member.attempt(member.holding.hold, unchanged=False)


def _slowest(seconds: Sequence[dict[str, float]]) -> dict[str, float]:
    """The largest value of each stage."""
    return {stage: max(each.get(stage, 0.0) for each in seconds) for stage in sorted({s for e in seconds for s in e})}


def _check_version(client: EngineClient, version: str) -> None:
    reported = client.get_weight_version()
    if reported != version:
        raise RuntimeError(f"it reports version {reported!r}, expected {version!r}")
