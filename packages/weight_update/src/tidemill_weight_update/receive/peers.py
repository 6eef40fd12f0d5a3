"""The ranks of one engine during an update: their reports to the trainer and to each other."""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tidemill_weight_update.control.mailbox import IDLE, MIXED, UNCHANGED, Mailbox
from tidemill_weight_update.control.request import Request
from tidemill_weight_update.control.wait import PollingWait


class Peers:
    """One rank's view of the ranks of its engine, in the mailbox of trainer rank 0.

    Args:
        control: mailbox of trainer rank 0.
        request: request of the update.
        rank: rank of this process in its engine.
        check: raises if the trainer has exited.

    Attributes:
        row: row of this rank.
        reached: last state that it reported.
    """

    def __init__(self, control: Mailbox, request: Request, rank: int, check: Callable[[], None]) -> None:
        self._control = control
        self._sequence = request.sequence
        self._rows = range(request.first_receiver, request.first_receiver + request.num_receivers)
        self._timeout_s = request.timeout_s
        self._check_trainer = check
        self.reached = IDLE
        self.row = request.first_receiver + rank

    def report(self, state: int, **reply: Any) -> None:
        """Publish this rank's state, unless the trainer is already in a later update.

        Raises:
            RuntimeError: the trainer has excluded this rank. It excludes a rank before it reads its state, and this
                method writes the state before it checks: so a rank that the trainer regards as not started never
                starts.
        """
        self.reached = state
        if self._control.is_at(self._sequence):
            self._control.report(self._sequence, self.row, state, reply)
        self._check_own_row()

    def check(self) -> None:
        """Raise RuntimeError if the trainer has exited or has excluded this rank."""
        self._check_trainer()
        self._check_own_row()

    def wait(self, state: int) -> None:
        """Return when all ranks have reached `state`, also if one of them failed after it.

        Raises:
            RuntimeError: a rank has failed or exited, or the trainer has exited.
            TimeoutError: no progress in time.
        """
        pending = set(self._rows) - {self.row}
        wait = PollingWait(self._timeout_s, "the other ranks of this engine", lambda: self._check(pending))
        while pending:
            for row in list(pending):
                reached = self._control.state(self._sequence, row)
                if reached in (UNCHANGED, MIXED) and self._control.reply(row).get("reached", IDLE) < state:
                    raise RuntimeError(f"rank {row - self._rows[0]} of this engine failed; see the error of that rank")
                if reached >= state:
                    pending.remove(row)
                    wait.progress()
            if pending:
                wait.pause()

    def share_totals(self, checksums: NDArray[np.int64], counts: NDArray[np.int64]) -> None:
        """Write the checksum and element count of each tensor on this rank; the next `report` announces them."""
        self._check_trainer()
        self._control.write_totals(self.row, checksums, counts)

    def sum_totals(self, num_tensors: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the sums over all ranks of what they wrote: checksums modulo 2**64, and element counts."""
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
                "the trainer excluded this rank: it made no progress within timeout_s of WeightUpdater (including the "
                "wait for running requests), or its client got no response in time"
            )

    def _check(self, pending: set[int]) -> None:
        self.check()
        for row in pending:
            rank = row - self._rows[0]
            if self._control.receiver_has_exited(self._sequence, row):
                pid = self._control.receiver_pid(self._sequence, row)
                raise RuntimeError(
                    f"rank {rank} of this engine (process {pid}) has exited; see the SGLang log of that rank"
                )
            if self._control.is_excluded(self._sequence, row):
                raise RuntimeError(f"rank {rank} of this engine made no progress; the trainer excluded it")
