"""When the engines of an update are asked to load."""

import time
from collections.abc import Callable

from tidemill_weight_update.control.readers import Readers
from tidemill_weight_update.control.request import Request
from tidemill_weight_update.send.fast import FastPath
from tidemill_weight_update.send.fleet import Fleet, Member

START_CALLS_S = 1e-3
"""How long threads have to ask engines, before this one keeps the interpreter to itself for milliseconds."""


class LoadCalls:
    """The engines with our loader in one update of this rank, each asked once.

    Args:
        fleet: has no members but on rank 0.
        fast: of this rank.
        sequence: of the update.
        request: what an engine is asked.
    """

    def __init__(self, fleet: Fleet, fast: FastPath, sequence: int, request: Callable[[Member], Request]) -> None:
        self._fleet = fleet
        self._fast = fast
        self._sequence = sequence
        self._request = request
        self._started_at = 0.0

    def start(self) -> None:
        """Asks the engines, unless they were asked before; threads wait for their answers."""
        if not self._fleet.calls:
            self._started_at = time.monotonic()
            self._fleet.load(self._request, self._fast.mailbox)

    def let_calls_start(self, is_reading: bool) -> None:
        """Gives the threads time to ask, before what keeps the interpreter for milliseconds.

        Args:
            is_reading: whether the GPU reads meanwhile, so that engines may be asked now.
        """
        if is_reading:
            self.start()
        if self._fleet.calls:
            time.sleep(max(0.0, self._started_at + START_CALLS_S - time.monotonic()))

    def hold(self, readers: Readers) -> None:
        """Holds back requests that could begin before the engines have loaded."""
        self._fleet.hold(self._sequence, self._fast.mailbox, readers)

    def cancel(self) -> None:
        """Tells engines that wait for this rank that it failed; if none was asked, other ranks that none will read."""
        self._fast.fail()
        if not self._fleet.calls:
            self._fleet.exclude(self._sequence, self._fast.mailbox)

    def join(self) -> None:
        """Waits for the engines' answers."""
        self._fleet.join(self._sequence, self._fast.mailbox)
