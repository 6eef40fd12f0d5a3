"""The future of a call: waits for its ranks, and can be an argument of another call."""

import asyncio
import math
import time
from collections.abc import Generator
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError

from tidemill_dispatch.ray.call import Call
from tidemill_dispatch.ray.failure import Failure
from tidemill_dispatch.sharding import DeferredRows, DeferredShard

# All ranks are waited for at once, in slices; a failure is noticed at the end of a slice.
_WAIT_SLICE_S = 0.2
_POLL_S = 0.005
_FETCH_TIMEOUT_S = 60.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.001, 0.05  # between checks of `await`


class CallFuture(DeferredRows):
    """Result of a method that is registered with `blocking=False`. A group creates it.

    `get` may be called again: it returns the same result, or raises the same error. `await future` is `get` without
    blocking the event loop; if it is cancelled, the ranks still run the call to its end. As an argument of another
    call, before or after `get`, its rows are sent from worker to worker. The object store keeps the rows as long as the
    future exists.
    """

    def __init__(self, call: Call):
        self.call = call
        self._result: list[Any] = []  # empty until fetched: the result itself may be None

    @property
    def still_running(self) -> tuple[int, ...]:
        """Ranks that had not answered when `done` or `get` last checked."""
        return self.call.still_running

    def done(self) -> bool:
        """Return whether all ranks have answered or one has failed: `get` then does not wait long."""
        self.call.poll(0.0)
        return self.call.failed_or_finished

    def get(self, timeout_s: float | None = None) -> Any:
        """Wait for the ranks and return the collected result.

        Args:
            timeout_s: timeout in seconds from now. None uses the rest of the call's own timeout.

        Raises:
            WorkerError: a rank of this call, or of a call whose future is an argument, raised. Other ranks are waited
                for at most about a second.
            WorkerDiedError: the process of a rank died.
            CallTimeoutError: ranks were still running at the timeout; `get` may be called again.
        """
        if not self._result and self.call.error is None:
            self._wait(timeout_s, None if timeout_s is None else time.monotonic() + timeout_s)
            self.call.release_upstreams()
        if self.call.error is not None:
            raise self.call.error
        return self._result[0]

    def __await__(self) -> Generator[Any, None, Any]:
        return self._get_when_short().__await__()

    async def _get_when_short(self) -> Any:
        """Return `get()`. Polls, because a thread that waits for the ranks could not be cancelled."""
        pause_s = _FIRST_PAUSE_S
        while not self._get_is_short():
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        return self.get()

    def _get_is_short(self) -> bool:
        """Return whether `get` returns or raises without waiting for ranks, or for results on other nodes."""
        call = self.call
        call.poll(0.0)
        if call.pending and call.error is None:
            return time.monotonic() >= self._wait_end_s(None)
        if self._result or call.error is not None or call.failures or not call.values:
            return True
        refs = list(call.values.values())
        here, _ = ray.wait(refs, num_returns=len(refs), timeout=0)  # starts to fetch the others
        return len(here) == len(refs) or time.monotonic() >= call.deadline_s()

    def chunk(self, n: int) -> list[DeferredShard]:
        """Return n shards in row order for another call, whose workers fetch the rows.

        Raises:
            TypeError: the results of the method are not parts of one batch.
        """
        if not self.call.is_batch_parts:
            raise TypeError(
                f"the results of {self.call.method!r} of group {self.call.group!r} are not parts of one batch, so its "
                "future cannot be an argument; call get() and pass the result"
            )
        return [DeferredShard(self, index, n) for index in range(n)]

    def __reduce__(self) -> Any:
        raise TypeError(
            f"it holds the future of {self.call.method!r}; pass the future as an argument of its own, or call get()"
        )

    def _wait(self, timeout_s: float | None, deadline_s: float | None) -> None:
        call = self.call
        while call.pending and call.error is None:
            remaining_s = self._wait_end_s(deadline_s) - time.monotonic()
            wait_s = max(0.0, min(remaining_s, _WAIT_SLICE_S))
            if not call.failures and self._get_all(wait_s):
                return
            call.poll(wait_s if call.failures else _POLL_S)
            if remaining_s > 0 or not call.pending or call.error is not None:
                continue
            if call.failures:
                break
            if self._deadline_s(deadline_s) <= time.monotonic():  # the end of an upstream call moves it
                raise call.timeout_error(timeout_s)
        with call.lock:
            if call.error is None and not call.failures:
                self._fetch(timeout_s, max(self._deadline_s(deadline_s) - time.monotonic(), _FETCH_TIMEOUT_S))
            if call.error is None and call.failures:
                call.finish_failed()

    def _wait_end_s(self, deadline_s: float | None) -> float:
        return self.call.grace_end_s if self.call.failures else self._deadline_s(deadline_s)

    def _deadline_s(self, explicit: float | None) -> float:
        return self.call.deadline_s() if explicit is None else explicit

    def _get_all(self, wait_s: float) -> bool:
        """Get receipts and values in one call to Ray, which is faster than two. Return False if one is missing."""
        call = self.call
        with call.lock:
            if self._result:
                return True
            try:
                got = ray.get([*call.pending, *call.values.values()], timeout=wait_s)
            except (GetTimeoutError, RayError):  # `poll` finds out which rank it is
                return False
            receipts, values = got[: len(call.pending)], got[len(call.pending) :]
            if any(isinstance(receipt, Failure) for receipt in receipts):
                return False
            self._result.append(call.collect(values))
            call.pending.clear()
            return True

    def _fetch(self, timeout_s: float | None, wait_s: float) -> None:
        if self._result:
            return
        call, timeout = self.call, wait_s if wait_s < math.inf else None
        try:
            values = ray.get(list(call.values.values()), timeout=timeout)
        except GetTimeoutError:
            raise call.timeout_error(timeout_s) from None
        except RayError:  # a result that cannot be pickled, or that was lost with its node
            for rank, ref in call.values.items():
                try:
                    ray.get(ref, timeout=timeout)
                except RayError as error:
                    call.failures[rank] = call.failure_of(rank, error)
            return
        self._result.append(call.collect(values))
