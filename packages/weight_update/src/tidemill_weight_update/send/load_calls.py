"""The calls that ask the engines of an update to load, made in threads."""

import time
from collections.abc import Callable

from tidemill_weight_update.control.readers import Readers
from tidemill_weight_update.control.request import Request
from tidemill_weight_update.send.fast import FastPath
from tidemill_weight_update.send.fleet import Fleet, Member

START_CALLS_S = 1e-3
"""Time for the threads to start their calls before this thread keeps the interpreter lock for milliseconds."""


class LoadCalls:
    """The load calls of one update; each engine with the tidemill loader is called once.

    Args:
        fleet: engines of the update; empty except on rank 0.
        fast: fast path of this rank.
        sequence: number of the update.
        request: returns the request for an engine.
    """

    def __init__(self, fleet: Fleet, fast: FastPath, sequence: int, request: Callable[[Member], Request]) -> None:
        self._fleet = fleet
        self._fast = fast
        self._sequence = sequence
        self._request = request
        self._started_at = 0.0

    def start(self) -> None:
        """Start the load calls unless they are running; threads wait for the responses."""
        if not self._fleet.calls:
            self._started_at = time.monotonic()
            self._fleet.load(self._request, self._fast.mailbox)

    def let_calls_start(self, is_reading: bool) -> None:
        """Give the threads time to start their calls, before work that keeps the interpreter lock for milliseconds.

        Args:
            is_reading: whether the GPU reads meanwhile, so that the calls may be started now.
        """
        if is_reading:
            self.start()
        if self._fleet.calls:
            time.sleep(max(0.0, self._started_at + START_CALLS_S - time.monotonic()))

    def hold(self, readers: Readers) -> None:
        """Hold back requests that could start before the engines have loaded."""
        self._fleet.hold(self._sequence, self._fast.mailbox, readers)

    def cancel(self) -> None:
        """Mark this rank as failed for waiting engines; if no engine was called, report to other ranks that none
        will read.
        """
        self._fast.fail()
        if not self._fleet.calls:
            self._fleet.exclude(self._sequence, self._fast.mailbox)

    def join(self) -> None:
        """Wait for the engines' responses."""
        self._fleet.join(self._sequence, self._fast.mailbox)
