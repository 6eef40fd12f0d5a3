"""A call that is under way on some ranks of a group."""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError

from tidemill_dispatch.errors import CallTimeoutError, WorkerDiedError, WorkerError
from tidemill_dispatch.ray.host import Failure

# After a rank raised, how long to look at the other ranks before its error is raised on the driver. A rank that was
# killed makes its peers' collectives fail at once, often before Ray reports the death: the death is the cause.
GRACE_S = 1.0
# All ranks are waited for at once, in slices; a failure is seen at the end of a slice.
_WAIT_SLICE_S = 0.2
_WATCH_S = 2.0
_FETCH_S = 60.0


class CallFuture:
    """The result of a call of a method that is registered with `blocking=False`. Made by a group.

    `get` may be called again: it returns the same result, or raises the same error.
    """

    def __init__(
        self,
        *,
        group: str,
        method: str,
        receipts: Mapping[int, ray.ObjectRef],
        values: Mapping[int, ray.ObjectRef],
        pings: Mapping[int, Callable[[], ray.ObjectRef]],
        collect: Callable[[list[Any]], Any],
        timeout_s: float,
        host_of: Callable[[int], str],
        on_death: Callable[[WorkerDiedError], None],
    ):
        self._group = group
        self._method = method
        self._pending = {ref: rank for rank, ref in receipts.items()}
        self._values = dict(values)
        self._pings = dict(pings)  # of the ranks that were not called: they may be what the others wait for
        self._watched: dict[int, ray.ObjectRef] = {}
        self._next_watch = time.monotonic() + _WATCH_S
        self._collect = collect
        self._timeout_s = timeout_s
        self._host_of = host_of
        self._on_death = on_death
        self._started = time.monotonic()
        self._failures: dict[int, Failure] = {}
        self._first_failure = 0.0
        self._error: Exception | None = None
        self._result: list[Any] = []

    @property
    def still_running(self) -> tuple[int, ...]:
        """The ranks that had not answered when last looked at."""
        return tuple(sorted(self._pending.values()))

    def done(self) -> bool:
        """Whether every rank has answered, or one has failed: `get` then returns or raises without a long wait."""
        if self._error is None and not self._result:
            self._poll(0.0)
        return self._error is not None or bool(self._failures) or not self._pending

    def get(self, timeout_s: float | None = None) -> Any:
        """Waits for the ranks and returns what the mode's `collect_fn` makes of their results.

        Args:
            timeout_s: seconds to wait from now; None takes what is left of the call's own deadline, which counts from
                the moment the call was made.

        Raises:
            WorkerError: a rank raised. The other ranks are not waited for beyond a second.
            WorkerDiedError: a rank's process ended.
            CallTimeoutError: ranks were still running at the deadline; `get` may be called again.
        """
        if self._error is None and not self._result:
            now = time.monotonic()
            limit_s = self._timeout_s if timeout_s is None else timeout_s
            self._finish(limit_s, self._started + limit_s if timeout_s is None else now + limit_s)
        if self._error is not None:
            raise self._error
        return self._result[0]

    def _finish(self, limit_s: float, deadline: float) -> None:
        while self._pending and self._error is None:
            until = self._first_failure + GRACE_S if self._failures else deadline
            remaining = until - time.monotonic()
            self._poll(max(0.0, min(remaining, _WAIT_SLICE_S)))
            if remaining > 0 or not self._pending or self._error is not None:
                continue
            if self._failures:
                break
            raise self._timeout(limit_s)
        if self._error is None and not self._failures:
            self._fetch(limit_s, max(deadline - time.monotonic(), _FETCH_S))
        if self._error is None and self._failures:
            self._error = self._worker_error()

    def _fetch(self, limit_s: float, wait_s: float) -> None:
        try:
            values = ray.get(list(self._values.values()), timeout=wait_s)
        except GetTimeoutError:
            raise self._timeout(limit_s) from None
        except RayError:  # a result that cannot be pickled, or that is lost with its node: find whose
            for rank, ref in self._values.items():
                try:
                    ray.get(ref, timeout=wait_s)
                except RayError as error:
                    self._failures[rank] = Failure.of_ray(self._host_of(rank), error)
            return
        self._result.append(self._collect(values))
        self._values.clear()

    def _poll(self, wait_s: float) -> None:
        """Waits up to `wait_s` for all ranks, then takes in every rank that has answered."""
        if not self._pending or self._error is not None:
            return
        ready, _ = ray.wait(list(self._pending), num_returns=len(self._pending), timeout=wait_s)
        if ready:
            self._take(ready)
        if self._pings and self._pending and time.monotonic() >= self._next_watch:
            self._watch()

    def _take(self, ready: list[ray.ObjectRef]) -> None:
        ranks = [self._pending.pop(ref) for ref in ready]
        try:
            failures = ray.get(ready)  # in one call where nothing went wrong
        except RayError:
            failures = []
            for rank, ref in zip(ranks, ready, strict=True):
                failures.append(self._receipt(rank, ref))
                if self._error is not None:
                    return
        failed = {rank: failure for rank, failure in zip(ranks, failures, strict=True) if failure is not None}
        if failed and not self._failures:
            self._first_failure = time.monotonic()
        self._failures.update(failed)

    def _receipt(self, rank: int, ref: ray.ObjectRef) -> Failure | None:
        try:
            return ray.get(ref)
        except RayActorError as error:
            self._error = self._died(rank, error)
            self._on_death(self._error)
        except RayError as error:  # outside the worker's method, for example while Ray unpickled an argument
            return Failure.of_ray(self._host_of(rank), error)

    def _watch(self) -> None:
        """Looks whether the ranks that were not called are alive."""
        self._next_watch = time.monotonic() + _WATCH_S
        for rank, ping in self._pings.items():
            if rank not in self._watched:
                self._watched[rank] = ping()
        answered, _ = ray.wait(list(self._watched.values()), num_returns=len(self._watched), timeout=0)
        for rank in [rank for rank, ref in self._watched.items() if ref in answered]:
            self._receipt(rank, self._watched.pop(rank))

    def _timeout(self, limit_s: float) -> CallTimeoutError:
        return CallTimeoutError(
            group=self._group, method=self._method, timeout_s=limit_s, still_running=self.still_running
        )

    def _lines(self, ranks: Sequence[int]) -> tuple[str, ...]:
        return tuple(f"rank {r}: {self._failures[r].error_type}: {self._failures[r].error_message}" for r in ranks)

    def _died(self, rank: int, error: RayActorError) -> WorkerDiedError:
        return WorkerDiedError(
            group=self._group,
            rank=rank,
            host=self._host_of(rank),
            method=self._method,
            reason=" ".join(str(error).split()).split(" Some common causes include")[0],
            other_errors=self._lines(sorted(self._failures)),
        )

    def _worker_error(self) -> WorkerError:
        first, *others = sorted(self._failures, key=lambda rank: self._failures[rank].time_s)
        failure = self._failures[first]
        return WorkerError(
            group=self._group,
            rank=first,
            host=failure.host,
            method=self._method,
            error_type=failure.error_type,
            error_message=failure.error_message,
            remote_traceback=failure.remote_traceback,
            other_errors=self._lines(others),
            still_running=self.still_running,
        )
