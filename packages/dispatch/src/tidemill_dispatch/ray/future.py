"""A call that is under way on some ranks of a group."""

import asyncio
import threading
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError

from tidemill_dispatch.errors import CallTimeoutError, WorkerDiedError, WorkerError
from tidemill_dispatch.ray.failure import Failure
from tidemill_dispatch.sharding import DeferredRows, DeferredShard

# After a rank raised, how long to look at the other ranks before its error is raised on the driver. A rank that was
# killed makes its peers' collectives fail at once, often before Ray reports the death: the death is the cause.
GRACE_S = 1.0
# All ranks are waited for at once, in slices; a failure is seen at the end of a slice.
_WAIT_SLICE_S = 0.2
_LOOK_S = 0.005
_WATCH_S = 2.0
_FETCH_S = 60.0


class Processes(Protocol):
    """What a call has to know of the processes that it runs in."""

    workers: list[Any]
    death: WorkerDiedError | None

    def note_death(self, error: WorkerDiedError) -> None: ...

    def host(self, rank: int) -> str: ...

    def node(self, rank: int) -> str: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class PendingCall:
    """A call as it was sent.

    Attributes:
        group: name of the group (with the role, if it has several).
        receipts, values: what each rank returns: a receipt from every rank that was called, a value from those whose
            result is sent, in the order in which the mode collects them.
        collect: makes the caller's result of the values.
        is_batch_parts: the values are parts of one batch.
        timeout_s: deadline in seconds after the call was made, or after the calls that it takes rows from ended.
    """

    processes: Processes
    group: str
    method: str
    receipts: Mapping[int, ray.ObjectRef]
    values: Mapping[int, ray.ObjectRef]
    collect: Callable[[list[Any]], Any]
    is_batch_parts: bool
    timeout_s: float


class CallFuture(DeferredRows):
    """The result of a call of a method that is registered with `blocking=False`. Made by a group.

    `get` may be called again: it returns the same result, or raises the same error. `await future` is `get` without
    blocking the event loop. Given to another call as an argument, the rows go from worker to worker; that works before
    and after `get`, and as long as the future is kept the store keeps the rows.
    """

    def __init__(self, call: PendingCall, upstreams: Sequence["CallFuture"] = ()):
        self.call = call
        self._upstreams = tuple(upstreams)  # the calls that it takes rows from, see _let_go
        self._unfinished = tuple(upstream for upstream in upstreams if upstream._pending)  # when last looked at
        self._pending = {ref: rank for rank, ref in call.receipts.items()}
        self._watched: dict[int, ray.ObjectRef] = {}
        self._next_watch = time.monotonic() + _WATCH_S
        self._started = time.monotonic()
        self._failures: dict[int, Failure] = {}
        self._first_failure = 0.0
        self._error: Exception | None = None
        self._result: list[Any] = []
        self._lock = threading.RLock()

    @property
    def still_running(self) -> tuple[int, ...]:
        """The ranks that had not answered when last looked at."""
        return tuple(sorted(self._pending.values()))

    def done(self) -> bool:
        """Whether every rank has answered, or one has failed: `get` then returns or raises without a long wait."""
        self._poll(0.0)
        return self._error is not None or bool(self._failures) or not self._pending

    def get(self, timeout_s: float | None = None) -> Any:
        """Waits for the ranks and returns what the mode's `collect_fn` makes of their results.

        Args:
            timeout_s: seconds to wait from now; None takes what is left of the call's own deadline.

        Raises:
            WorkerError: a rank raised, of this call or of one that it takes rows from. The other ranks are not waited
                for beyond a second.
            WorkerDiedError: a rank's process ended.
            CallTimeoutError: ranks were still running at the deadline; `get` may be called again.
        """
        if not self._result and self._error is None:
            self._finish(timeout_s, None if timeout_s is None else time.monotonic() + timeout_s)
            self._let_go()
        if self._error is not None:
            raise self._error
        return self._result[0]

    def __await__(self) -> Generator[Any, None, Any]:
        return asyncio.to_thread(self.get).__await__()

    def chunk(self, n: int) -> list[DeferredShard]:
        """n shards in row order for another call, which takes the rows from the workers that made them.

        Raises:
            TypeError: the method's mode does not make one batch of its results.
        """
        if not self.call.is_batch_parts:
            raise TypeError(
                f"the results of {self.call.method!r} of group {self.call.group!r} are not parts of one batch, so its "
                "future cannot be an argument; call get() and pass what it returns"
            )
        return [DeferredShard(self, index, n) for index in range(n)]

    def __reduce__(self) -> Any:
        raise TypeError(
            f"it holds the future of {self.call.method!r}: pass a future as an argument by itself, or call get()"
        )

    def _finish(self, limit_s: float | None, deadline: float | None) -> None:
        while self._pending and self._error is None:
            until = self._first_failure + GRACE_S if self._failures else self._deadline(deadline)
            remaining = until - time.monotonic()
            wait_s = max(0.0, min(remaining, _WAIT_SLICE_S))
            if not self._failures and self._get_all(wait_s):
                return
            self._poll(wait_s if self._failures else _LOOK_S)
            if remaining > 0 or not self._pending or self._error is not None:
                continue
            if self._failures:
                break
            if self._deadline(deadline) <= time.monotonic():  # an upstream that just ended moves it
                raise self._timeout(limit_s)
        with self._lock:
            if self._error is None and not self._failures:
                self._fetch(limit_s, max(self._deadline(deadline) - time.monotonic(), _FETCH_S))
            if self._error is None and self._failures:
                self._look_at(self._before(running=False))
                self._settle()

    def _deadline(self, explicit: float | None) -> float:
        if explicit is not None:
            return explicit
        running = self._before(running=True)
        first = [call for call in running if not any(upstream._pending for upstream in call._upstreams)]
        return min(call._started + call.call.timeout_s for call in first or [self])

    def _fetch(self, limit_s: float | None, wait_s: float) -> None:
        if self._result:
            return
        try:
            values = ray.get(list(self.call.values.values()), timeout=wait_s)
        except GetTimeoutError:
            raise self._timeout(limit_s) from None
        except RayError:  # a result that cannot be pickled, or that is lost with its node: find whose
            for rank, ref in self.call.values.items():
                try:
                    ray.get(ref, timeout=wait_s)
                except RayError as error:
                    self._failures[rank] = Failure.of_ray(self._host(rank), error)
            return
        self._result.append(self.call.collect(values))

    def _get_all(self, wait_s: float) -> bool:
        """Gets receipts and values in one call to Ray, which is faster than two; False if that was too soon."""
        with self._lock:
            if self._result:
                return True
            try:
                got = ray.get([*self._pending, *self.call.values.values()], timeout=wait_s)
            except (GetTimeoutError, RayError):  # to be looked at one by one
                return False
            receipts = dict(zip(self._pending.values(), got, strict=False))
            if any(isinstance(receipt, Failure) for receipt in receipts.values()):
                return False
            self._result.append(self.call.collect(got[len(receipts) :]))
            self._pending.clear()
            return True

    def _poll(self, wait_s: float) -> None:
        """Waits up to `wait_s` for all ranks, then takes in every rank that has answered."""
        self._look(wait_s)
        if self._pending and self._error is None:
            self._look_at(self._before(running=True))
        self._heed()

    @staticmethod
    def _look_at(calls: Sequence["CallFuture"]) -> None:
        for call in calls:
            call._look(0.0)
            call._heed()
            call._settle()

    def _before(self, *, running: bool) -> list["CallFuture"]:
        """The calls that led to this one, each behind those that it takes rows from itself.

        Args:
            running: those only that have not ended, without what led to the others.
        """
        order: list[CallFuture] = []
        seen: set[int] = set()
        stack = [(upstream, False) for upstream in self._upstreams]  # a chain may be longer than Python can recurse
        while stack:
            call, is_last = stack.pop()
            if is_last:
                order.append(call)
            elif id(call) not in seen and (call._pending or not running):
                seen.add(id(call))
                stack += [(call, True), *((upstream, False) for upstream in call._upstreams)]
        return order

    def _look(self, wait_s: float) -> None:
        """Takes in the ranks that have answered, and that the group has lost one."""
        with self._lock:
            if not self._pending or self._error is not None:
                return
            ready, _ = ray.wait(list(self._pending), num_returns=len(self._pending), timeout=wait_s)
            if ready:
                self._take(ready)
            if self._pending and self._error is None:
                self._error = self.call.processes.death

    def _heed(self) -> None:
        """Takes over what has become of the calls before, which were looked at."""
        with self._lock:
            for upstream in self._unfinished if self._pending else ():
                self._started = time.monotonic()  # this call's time counts from the end of those before it
                self._error = self._error or upstream._error
            self._unfinished = tuple(upstream for upstream in self._unfinished if upstream._pending)
            if self._pending and self._error is None and time.monotonic() >= self._next_watch:
                self._watch()
            self._let_go()

    def _let_go(self) -> None:
        """Drops the calls before, once they cannot be what this one waits for or fails by.

        Otherwise the last future of a chain would keep the results of all.
        """
        if self._error is not None or not (self._pending or self._failures):
            self._upstreams = self._unfinished = ()

    def _take(self, ready: list[ray.ObjectRef]) -> None:
        ranks = [self._pending.pop(ref) for ref in ready]
        try:
            receipts = ray.get(ready)  # in one call where nothing went wrong
        except RayError:
            receipts = []
            for rank, ref in zip(ranks, ready, strict=True):
                receipts.append(self._receipt(rank, ref))
                if self._error is not None:
                    return
        failed = {rank: r for rank, r in zip(ranks, receipts, strict=True) if isinstance(r, Failure)}
        if failed and not self._failures:
            self._first_failure = time.monotonic()
        self._failures.update(failed)

    def _receipt(self, rank: int, ref: ray.ObjectRef) -> Failure | int | None:
        try:
            return ray.get(ref)
        except RayTaskError as error:  # Ray could not bring an argument: what it came from was lost, or cannot be read
            return Failure.of_ray(self._host(rank), error)
        except RayActorError as error:
            self._error = self._died(rank, error)
            self.call.processes.note_death(self._error)
        except RayError as error:
            return Failure.of_ray(self._host(rank), error)
        return None

    def _watch(self) -> None:
        """Looks whether the ranks that were not called are alive: they may be what the others wait for."""
        self._next_watch = time.monotonic() + _WATCH_S
        for rank, worker in enumerate(self.call.processes.workers):
            if rank not in self.call.receipts and rank not in self._watched:
                self._watched[rank] = worker.tidemill_ping.remote()
        if not self._watched:
            return
        answered, _ = ray.wait(list(self._watched.values()), num_returns=len(self._watched), timeout=0)
        for rank in [rank for rank, ref in self._watched.items() if ref in answered]:
            self._receipt(rank, self._watched.pop(rank))

    def _settle(self) -> None:
        """Notes the error of a call that has failed for certain: that of one before it, from which its own follow."""
        with self._lock:
            over = not self._pending or time.monotonic() >= self._first_failure + GRACE_S
            if self._error is None and self._failures and over:
                errors = [upstream._error for upstream in self._upstreams if upstream._error is not None]
                self._error = errors[0] if errors else self._worker_error()

    def _timeout(self, limit_s: float | None) -> CallTimeoutError:
        call = self
        while running := [upstream for upstream in call._upstreams if upstream._pending]:
            call = running[0]
        return CallTimeoutError(
            group=call.call.group,
            method=call.call.method,
            timeout_s=call.call.timeout_s if limit_s is None else limit_s,
            still_running=call.still_running,
        )

    def _host(self, rank: int) -> str:
        return self.call.processes.host(rank)

    def _lines(self, ranks: Sequence[int]) -> tuple[str, ...]:
        return tuple(f"rank {r}: {self._failures[r].error_type}: {self._failures[r].error_message}" for r in ranks)

    def _died(self, rank: int, error: RayActorError) -> WorkerDiedError:
        return WorkerDiedError(
            group=self.call.group,
            rank=rank,
            host=self._host(rank),
            method=self.call.method,
            reason=" ".join(str(error).split()).split(" Some common causes include")[0],
            other_errors=self._lines(sorted(self._failures)),
        )

    def _worker_error(self) -> WorkerError:
        first, *others = sorted(self._failures, key=lambda rank: self._failures[rank].time_s)
        failure = self._failures[first]
        return WorkerError(
            group=self.call.group,
            rank=first,
            host=failure.host,
            method=self.call.method,
            error_type=failure.error_type,
            error_message=failure.error_message,
            remote_traceback=failure.remote_traceback,
            other_errors=self._lines(others),
            still_running=self.still_running,
        )
