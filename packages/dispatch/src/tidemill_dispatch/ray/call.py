"""A call that was sent to ranks of a group: which ranks have answered, and whether the call has failed."""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError

from tidemill_dispatch.errors import CallTimeoutError, WorkerDiedError, WorkerError
from tidemill_dispatch.ray.failure import Failure
from tidemill_dispatch.ray.rendezvous import HostInfo

# Time from a rank's exception to the error on the driver. When a rank is killed, collectives of its peers fail at once,
# often before Ray reports the death. The death is the cause, so the driver waits for that report.
GRACE_S = 1.0
PING_INTERVAL_S = 2.0


@dataclass(eq=False)
class Generation:
    """The processes of a group from its start, or a restart of ranks, to the next restart.

    Attributes:
        hosts: where each rank runs; empty until the workers are constructed.
        death: error of the first call that noticed the death of a worker.
    """

    hosts: list[HostInfo] = field(default_factory=list)
    death: WorkerDiedError | None = None

    def host(self, rank: int) -> str:
        return f"{self.hosts[rank].hostname}:{self.hosts[rank].pid}" if self.hosts else "unknown host"

    def node(self, rank: int) -> str:
        return self.hosts[rank].node_id


class Processes(Protocol):
    """The part of a group's processes that a call uses."""

    workers: list[Any]
    generation: Generation


class Call:
    """A call that was sent, and the answers received so far.

    Args:
        processes: processes of the group.
        generation: their generation when the call was sent. The call marks it as dead, and not a later one.
        group: name of the group (with the role, if it has several).
        method: name of the method.
        receipts: small return value of each rank that runs: a `Failure`, the number of rows of its result, or None.
        values: result of each collect rank, in the order in which the mode collects them.
        collect: `(results)` -> return value of the call.
        is_batch_parts: whether the results are parts of one batch.
        timeout_s: timeout in seconds, from the send or from the end of the upstream calls.
        upstreams: calls whose results are arguments of this one. Dropped when they can no longer affect it: otherwise
            the last future of a chain would keep all results in the object store.

    Attributes:
        pending: ranks that have not answered, by receipt, as of the last `poll`.
        failures: exceptions by rank.
        error: error of the call, once it is certain.
        lock: held while the state changes; threads may share a future or its upstream calls.
    """

    def __init__(
        self,
        *,
        processes: Processes,
        generation: Generation,
        group: str,
        method: str,
        receipts: Mapping[int, ray.ObjectRef],
        values: Mapping[int, ray.ObjectRef],
        collect: Callable[[list[Any]], Any],
        is_batch_parts: bool,
        timeout_s: float,
        upstreams: Sequence["Call"] = (),
    ):
        self.processes = processes
        self.generation = generation
        self.group = group
        self.method = method
        self.receipts = receipts
        self.values = values
        self.collect = collect
        self.is_batch_parts = is_batch_parts
        self.timeout_s = timeout_s
        self.pending = {ref: rank for rank, ref in receipts.items()}
        self.failures: dict[int, Failure] = {}
        self.error: Exception | None = None
        self.lock = threading.RLock()
        self._upstreams = tuple(upstreams)
        self._running_upstreams = tuple(upstream for upstream in upstreams if upstream.pending)
        self._started_s = time.monotonic()
        self._first_failure_s = 0.0
        self._pings: dict[int, ray.ObjectRef] = {}
        self._next_ping_s = self._started_s + PING_INTERVAL_S

    @property
    def still_running(self) -> tuple[int, ...]:
        """Ranks that had not answered at the last `poll`."""
        return tuple(sorted(self.pending.values()))

    @property
    def failed_or_finished(self) -> bool:
        return self.error is not None or bool(self.failures) or not self.pending

    @property
    def grace_end_s(self) -> float:
        """Time (of `time.monotonic`) until which other ranks are waited for after the first exception."""
        return self._first_failure_s + GRACE_S

    def deadline_s(self) -> float:
        """Return the time (of `time.monotonic`) at which the call, or the upstream call it waits for, times out."""
        running = self._upstreams_in_order(running_only=True)
        first = [call for call in running if not any(upstream.pending for upstream in call._upstreams)]
        return min(call._started_s + call.timeout_s for call in first or [self])

    def timeout_error(self, timeout_s: float | None) -> CallTimeoutError:
        """Return the error of a timeout, which names the call that is running. None: timeout of that call itself."""
        call = self
        while running := [upstream for upstream in call._upstreams if upstream.pending]:
            call = running[0]
        return CallTimeoutError(
            group=call.group,
            method=call.method,
            timeout_s=call.timeout_s if timeout_s is None else timeout_s,
            still_running=call.still_running,
        )

    def poll(self, wait_s: float) -> None:
        """Wait up to `wait_s` seconds for all ranks, then record the answers to this call and to running upstreams."""
        self._record_answers(wait_s)
        if self.pending and self.error is None:
            self._poll_upstreams(running_only=True)
        self._follow_upstreams()

    def finish_failed(self) -> None:
        """Set `error` of a call in which ranks failed: that of an upstream call if it is the cause."""
        self._poll_upstreams(running_only=False)
        self._set_error()

    def release_upstreams(self) -> None:
        """Drop the upstream calls if this call neither waits for them nor can fail because of them."""
        if self.error is not None or not (self.pending or self.failures):
            self._upstreams = self._running_upstreams = ()

    def failure_of(self, rank: int, error: RayError) -> Failure:
        return Failure.from_ray(self.generation.host(rank), error)

    def _poll_upstreams(self, *, running_only: bool) -> None:
        for call in self._upstreams_in_order(running_only=running_only):
            call._record_answers(0.0)
            call._follow_upstreams()
            call._set_error()

    def _upstreams_in_order(self, *, running_only: bool) -> list["Call"]:
        """Return all direct and indirect upstream calls, each after its own upstreams.

        Args:
            running_only: leave out calls that have finished, and their upstreams.
        """
        order: list[Call] = []
        seen: set[int] = set()
        stack = [(upstream, False) for upstream in self._upstreams]  # a chain may exceed Python's recursion limit
        while stack:
            call, is_visited = stack.pop()
            if is_visited:
                order.append(call)
            elif id(call) not in seen and (call.pending or not running_only):
                seen.add(id(call))
                stack += [(call, True), *((upstream, False) for upstream in call._upstreams)]
        return order

    def _record_answers(self, wait_s: float) -> None:
        with self.lock:
            if not self.pending or self.error is not None:
                return
            ready, _ = ray.wait(list(self.pending), num_returns=len(self.pending), timeout=wait_s)
            if ready:
                self._record_receipts(ready)
            if self.pending and self.error is None:
                self.error = self.generation.death

    def _record_receipts(self, ready: list[ray.ObjectRef]) -> None:
        ranks = [self.pending.pop(ref) for ref in ready]
        try:
            receipts = ray.get(ready)  # one call for all where Ray raises for none
        except RayError:
            receipts = []
            for rank, ref in zip(ranks, ready, strict=True):
                receipts.append(self._receipt(rank, ref))
                if self.error is not None:
                    return
        failed = {rank: r for rank, r in zip(ranks, receipts, strict=True) if isinstance(r, Failure)}
        if failed and not self.failures:
            self._first_failure_s = time.monotonic()
        self.failures.update(failed)

    def _receipt(self, rank: int, ref: ray.ObjectRef) -> Failure | int | None:
        try:
            return ray.get(ref)
        except RayTaskError as error:  # Ray could not provide an argument: its object was lost, or cannot be unpickled
            return self.failure_of(rank, error)
        except RayActorError as error:
            self.error = self._death_error(rank, error)
            self.generation.death = self.generation.death or self.error
        except RayError as error:
            return self.failure_of(rank, error)
        return None

    def _follow_upstreams(self) -> None:
        """Take over errors of upstream calls, start the timeout at their end, and ping ranks that were not called."""
        with self.lock:
            for upstream in self._running_upstreams if self.pending else ():
                self._started_s = time.monotonic()
                self.error = self.error or upstream.error
            self._running_upstreams = tuple(upstream for upstream in self._running_upstreams if upstream.pending)
            is_current = self.generation is self.processes.generation  # a restart replaces ranks that were not called
            if self.pending and self.error is None and is_current and time.monotonic() >= self._next_ping_s:
                self._ping_uncalled_ranks()
            self.release_upstreams()

    def _ping_uncalled_ranks(self) -> None:
        """Detect the death of ranks that were not called: the called ranks may wait for them in a collective."""
        self._next_ping_s = time.monotonic() + PING_INTERVAL_S
        for rank, worker in enumerate(self.processes.workers):
            if rank not in self.receipts and rank not in self._pings:
                self._pings[rank] = worker.tidemill_ping.remote()
        if not self._pings:
            return
        answered, _ = ray.wait(list(self._pings.values()), num_returns=len(self._pings), timeout=0)
        for rank in [rank for rank, ref in self._pings.items() if ref in answered]:
            self._receipt(rank, self._pings.pop(rank))

    def _set_error(self) -> None:
        """Set `error` if ranks failed and the grace time is over. The error of an upstream call takes precedence."""
        with self.lock:
            is_certain = not self.pending or time.monotonic() >= self.grace_end_s
            if self.error is None and self.failures and is_certain:
                errors = [upstream.error for upstream in self._upstreams if upstream.error is not None]
                self.error = errors[0] if errors else self._worker_error()

    def _failure_lines(self, ranks: Sequence[int]) -> tuple[str, ...]:
        return tuple(f"rank {r}: {self.failures[r].error_type}: {self.failures[r].error_message}" for r in ranks)

    def _death_error(self, rank: int, error: RayActorError) -> WorkerDiedError:
        return WorkerDiedError(
            group=self.group,
            rank=rank,
            host=self.generation.host(rank),
            method=self.method,
            reason=" ".join(str(error).split()).split(" Some common causes include")[0],
            other_errors=self._failure_lines(sorted(self.failures)),
        )

    def _worker_error(self) -> WorkerError:
        first, *others = sorted(self.failures, key=lambda rank: self.failures[rank].time_s)
        failure = self.failures[first]
        return WorkerError(
            group=self.group,
            rank=first,
            host=failure.host,
            method=self.method,
            error_type=failure.error_type,
            error_message=failure.error_message,
            remote_traceback=failure.remote_traceback,
            other_errors=self._failure_lines(others),
            still_running=self.still_running,
        )
