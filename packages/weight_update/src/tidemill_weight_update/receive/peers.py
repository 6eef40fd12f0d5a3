"""The ranks of one engine during an update: what they tell the trainer and each other."""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tidemill_weight_update.control.channel import Channel
from tidemill_weight_update.control.mailbox import IDLE, MIXED, UNCHANGED
from tidemill_weight_update.control.request import Request
from tidemill_weight_update.control.wait import PollingWait


class Peers:
    """One rank's view of the ranks of its engine, in the mailbox of trainer rank 0.

    Args:
        control: that mailbox.
        request: of the update.
        rank: of this process in its engine.
        check: raises if the trainer is gone.

    Attributes:
        row: of this rank.
        reached: the last state that it reported.
    """

    def __init__(self, control: Channel, request: Request, rank: int, check: Callable[[], None]) -> None:
        self._control = control
        self._sequence = request.sequence
        self._rows = range(request.first_receiver, request.first_receiver + request.num_receivers)
        self._timeout_s = request.timeout_s
        self._check_trainer = check
        self.reached = IDLE
        self.row = request.first_receiver + rank

    def report(self, state: int, **reply: Any) -> None:
        """Makes this rank's state known, unless the trainer has gone on.

        Raises:
            RuntimeError: the trainer has given this rank up. It does so before it reads the state, which is written
                before this looks: a rank that the trainer takes for one that has not begun will never begin.
        """
        self.reached = state
        if self._control.is_at(self._sequence):
            self._control.report(self._sequence, self.row, state, reply)
        self._check_own_row()

    def check(self) -> None:
        """Raises RuntimeError: the trainer is gone, or has given this rank up, which waits for nothing then."""
        self._check_trainer()
        self._check_own_row()

    def wait(self, state: int) -> None:
        """Returns when all ranks have come to `state`, even if one of them failed since: what it knew, this one knows.

        Raises:
            RuntimeError: one of them has failed or ended, or the trainer is gone.
            TimeoutError: nothing happened for too long.
        """
        pending = set(self._rows) - {self.row}
        wait = PollingWait(self._timeout_s, "the other ranks of this engine", lambda: self._check(pending))
        while pending:
            for row in list(pending):
                reached = self._control.state(self._sequence, row)
                if reached in (UNCHANGED, MIXED) and self._control.reply(row).get("reached", IDLE) < state:
                    raise RuntimeError(f"rank {row - self._rows[0]} of this engine failed")
                if reached >= state:
                    pending.remove(row)
                    wait.progress()
            if pending:
                wait.pause()

    def share_totals(self, checksums: NDArray[np.int64], counts: NDArray[np.int64]) -> None:
        """Write the checksum and element count of each tensor on this rank; announced by the next `report`."""
        self._check_trainer()
        self._control.write_totals(self.row, checksums, counts)

    def sum_totals(self, num_tensors: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The sums over all ranks of what they left: checksums modulo 2**64, and element counts."""
        totals = [self._control.totals(row, num_tensors) for row in self._rows]
        checksums = np.zeros(num_tensors, np.int64)
        counts = np.zeros(num_tensors, np.int64)
        for checksum, count in totals:
            checksums += checksum
            counts += count
        return checksums, counts

    def _check_own_row(self) -> None:
        if self._control.is_excluded(self._sequence, self.row):
            raise RuntimeError(
                "the trainer has given this rank up: it made no progress within timeout_s of WeightUpdater (requests "
                "that are waited for count), or its client got no answer in time"
            )

    def _check(self, pending: set[int]) -> None:
        self.check()
        for row in pending:
            rank = row - self._rows[0]
            if self._control.receiver_has_exited(self._sequence, row):
                pid = self._control.receiver_pid(self._sequence, row)
                raise RuntimeError(f"rank {rank} of this engine (process {pid}) has ended")
            if self._control.is_excluded(self._sequence, row):
                raise RuntimeError(f"rank {rank} of this engine made no progress; the trainer has given it up")
