"""The protocol between one trainer rank and all engine ranks; PROTOCOL.md describes a whole update.

The first word of a record is a stamp: the number of the update in its upper half, and a state, a number, or both in its
lower half. What belongs to another update is not seen.
"""

import json
from contextlib import suppress
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from tidemill_weight_update.control.board import (
    MAX_TENSORS,
    REPLY_BYTES,
    Board,
    LinkError,
    PollingWait,
    has_exited,
    own_process,
)
from tidemill_weight_update.control.descriptor import BucketDescriptor

Text = tuple[int, int]
"""Number and length of a text on a board."""


class TrainerState(IntEnum):
    """States of a trainer rank in an update."""

    NONE = 0
    BEGUN = 1
    OPEN = 2
    SENT = 3
    FAILED = 4
    DONE = 5


class EngineState(IntEnum):
    """States of an engine rank in an update.

    The last two mean failure: UNCHANGED before it changed any parameter; MIXED if it may hold a mix of old and new
    weights.
    """

    IDLE = 0
    ATTACHED = 1
    CHECKED = 2
    COPIED = 3
    LOADED = 4
    UNCHANGED = 5
    MIXED = 6


IDLE, ATTACHED, CHECKED, COPIED, LOADED, UNCHANGED, MIXED = EngineState


class ReaderState(IntEnum):
    """How an engine rank reads the buckets of a trainer rank that are not in place."""

    NONE = 0
    MAPS = 1
    WAITS = 2


@dataclass(frozen=True, slots=True)
class Reader:
    """What an engine rank wrote for one trainer rank.

    Attributes:
        released: number of buckets that it no longer needs.
        state: how it reads; with WAITS, it waits for bucket `released`.
        wire: number of its wire to the trainer rank.
        parts: hash and length of the text that lists the parts it reads of the bucket.
    """

    released: int = 0
    state: ReaderState = ReaderState.NONE
    wire: int = 0
    parts: Text = (0, 0)

    def waits_for(self, bucket: int) -> bool:
        return self.state == ReaderState.WAITS and self.released == bucket


_LOW = (1 << 32) - 1


def _stamp(sequence: int, value: int) -> int:
    return sequence << 32 | value


class Mailbox:
    """One process's view of the mailbox of a trainer rank. Engine ranks report in that of trainer rank 0."""

    _reader_state = ReaderState.MAPS

    def __init__(self, board: Board) -> None:
        self.board = board
        self._declared: Text = (0, 0)

    def close(self) -> None:
        self.board.close()

    # The trainer rank writes.

    def begin(self, sequence: int) -> None:
        """Start an update. Engine ranks of earlier updates no longer count."""
        self._put_trainer(sequence, TrainerState.BEGUN)

    def declare(self, text: bytes) -> None:
        """Write the descriptors of all buckets, before `publish`; they stay valid until the next call."""
        self.board.write("declaration", 0, text)
        self._declared = self._declared[0] + 1, len(text)

    def write_checksums(self, first: int, checksums: NDArray[np.int64]) -> None:
        """Write the checksums of a bucket, before it is published."""
        self.board.write("checksums", first, checksums)

    def publish(self, sequence: int, num_buckets: int) -> None:
        """Announce that the first `num_buckets` buckets are filled; with 0, that the declaration is valid."""
        self._put_trainer(sequence, TrainerState.OPEN, num_buckets)

    def finish(self, sequence: int, num_buckets: int) -> None:
        """Let the engines finish the update; all buckets are filled."""
        self._put_trainer(sequence, TrainerState.SENT, num_buckets)

    def end(self, sequence: int) -> None:
        """Announce that engines have the version of an update whose buckets were all sent, or are excluded."""
        with suppress(LinkError):  # then nobody can read it
            stamp = self.board.get("trainer", 0)[0]
            if stamp >> 32 == sequence and stamp & 7 == TrainerState.SENT:
                self._put_trainer(sequence, TrainerState.DONE, (stamp & _LOW) >> 3)

    def fail(self, sequence: int) -> None:
        """Announce that no more buckets follow."""
        with suppress(LinkError):  # the engines time out, and the caller raises the first error
            self._put_trainer(sequence, TrainerState.FAILED)

    def exclude(self, sequence: int, receiver: int) -> None:
        """Mark `receiver` as excluded, in rank 0's mailbox: nobody waits for it any more."""
        self.board.put("excluded", receiver, _stamp(sequence, 1))

    def _put_trainer(self, sequence: int, state: TrainerState, num_buckets: int = 0) -> None:
        self.board.put("trainer", 0, _stamp(sequence, num_buckets << 3 | state), *own_process(), *self._declared)

    # Engine ranks write.

    def acknowledge(self, sequence: int, receiver: int, num_buckets: int) -> None:
        """Report that `receiver` no longer needs the first `num_buckets` buckets."""
        if self.is_at(sequence):  # in a later update another engine may have this row
            self.board.put("reader", receiver, _stamp(sequence, num_buckets), self._reader_state)

    def wait_for(self, sequence: int, receiver: int, bucket: int, wire: int, parts: Text) -> None:
        """Report that `receiver` waits for these parts of a bucket and needs no earlier one."""
        self.board.put("reader", receiver, _stamp(sequence, bucket), ReaderState.WAITS, wire, *parts)

    def report(self, sequence: int, receiver: int, state: int, reply: dict[str, Any]) -> None:
        """Publish `state` of `receiver` together with `reply`, whose error is truncated."""
        if "error" in reply:
            reply = reply | {"error": reply["error"][:4096]}
        text = json.dumps(reply).encode()
        assert len(text) <= REPLY_BYTES, f"a reply of {len(text)} bytes, there is room for {REPLY_BYTES}"
        self.board.write("replies", receiver, text)
        self.board.put("report", receiver, _stamp(sequence, state), *own_process(), len(text))

    def write_totals(self, receiver: int, checksums: NDArray[np.int64], counts: NDArray[np.int64]) -> None:
        """Write what `receiver` copied of each tensor; the next `report` announces it."""
        if len(checksums) > MAX_TENSORS:
            raise ValueError(f"one update supports at most {MAX_TENSORS} tensors, got {len(checksums)}")
        self.board.write("totals", 2 * receiver, checksums)
        self.board.write("totals", 2 * receiver + 1, counts)

    # All read.

    @property
    def owner(self) -> tuple[int, int]:
        """Process ID and location of the trainer rank; see `board.here`."""
        _, pid, location, *_ = self.board.get("trainer", 0)
        return pid, location

    def owner_has_exited(self) -> bool:
        """Return whether the trainer rank is known to have exited; only a process of the same machine can know."""
        return has_exited(*self.owner)

    def is_at(self, sequence: int) -> bool:
        """Return whether this is the current update. In later updates, other engine ranks may have the same rows."""
        return self.board.get("trainer", 0)[0] >> 32 == sequence

    def trainer_words(self, sequence: int) -> list[int]:
        """Return the words of the trainer rank; raise RuntimeError unless this is the current update."""
        words = self.board.get("trainer", 0)
        if words[0] >> 32 != sequence:
            raise RuntimeError(
                f"the trainer cancelled update {sequence} before this engine started it; see the error of update() in "
                f"the trainer's log"
            )
        return words

    def is_updating(self) -> bool:
        """Return whether an update is open, and not known to be over: engines have another version than they report."""
        try:
            state = self.board.get("trainer", 0)[0] & 7
            is_open = state in (TrainerState.OPEN, TrainerState.SENT)
            return is_open and self.board.is_current() and not self.owner_has_exited()
        except LinkError:
            return False

    def declared(self, sequence: int) -> int | None:
        """Return the number of the declaration that the update sends, or None before the update is open."""
        stamp, _, _, number, *_ = self._trainer(sequence)
        return number if stamp & 7 in (TrainerState.OPEN, TrainerState.SENT, TrainerState.DONE) else None

    def published(self, sequence: int) -> tuple[int, bool]:
        """Return how many buckets are filled, and whether engines may finish the update.

        Raises:
            RuntimeError: the mailbox belongs to another update, or the trainer rank has failed.
        """
        stamp = self._trainer(sequence)[0]
        return (stamp & _LOW) >> 3, stamp & 7 in (TrainerState.SENT, TrainerState.DONE)

    def _trainer(self, sequence: int) -> list[int]:
        words = self.trainer_words(sequence)
        if words[0] & 7 == TrainerState.FAILED:
            raise RuntimeError("the trainer failed while sending; see the error in the trainer's log")
        return words

    def read_declaration(self) -> bytes:
        """Return the text of the declaration of the update that is open."""
        return bytes(self.board.read("declaration", 0, self.board.get("trainer", 0)[4]))

    def sent(self, first: int, count: int) -> NDArray[np.int64]:
        """Return `count` checksums of published tensors, from index `first`: int64 [count]."""
        return np.frombuffer(self.board.read("checksums", first, 8 * count), np.int64)

    def is_excluded(self, sequence: int, receiver: int) -> bool:
        return self.board.get("excluded", receiver)[0] == _stamp(sequence, 1)

    def readers(self, sequence: int, num_receivers: int) -> list[Reader]:
        """Return what each engine rank wrote for this trainer rank in this update."""
        return [
            Reader(stamp & _LOW, ReaderState(state), wire, (parts, length)) if stamp >> 32 == sequence else Reader()
            for stamp, state, wire, parts, length, *_ in self.board.get_rows("reader", num_receivers)
        ]

    def state(self, sequence: int, receiver: int) -> int:
        stamp = self.board.get("report", receiver)[0]
        return stamp & _LOW if stamp >> 32 == sequence else IDLE

    def reply(self, receiver: int) -> dict[str, Any]:
        _, _, _, length, *_ = self.board.get("report", receiver)
        return json.loads(bytes(self.board.read("replies", receiver, length)))

    def exited_receiver(self, sequence: int, receiver: int) -> int | None:
        """Return the process ID of `receiver` if it is known to have exited after it reported."""
        stamp, pid, location, *_ = self.board.get("report", receiver)
        return pid if stamp >> 32 == sequence and has_exited(pid, location) else None

    def is_lost(self, sequence: int, receiver: int) -> bool:
        """Return whether nobody waits for `receiver` any more: it is excluded, or has exited."""
        return self.is_excluded(sequence, receiver) or self.exited_receiver(sequence, receiver) is not None

    def totals(self, receiver: int, num_tensors: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return what `receiver` wrote for each tensor: checksums and element counts, int64 [num_tensors] each."""
        checksums, counts = (self.board.read("totals", 2 * receiver + i, 8 * num_tensors) for i in range(2))
        return np.frombuffer(checksums, np.int64), np.frombuffer(counts, np.int64)


class Readers:
    """The engine ranks that must read what this trainer rank publishes. Failed and exited ones need not.

    Rank 0 excludes engine ranks that make no progress, for all trainer ranks; the other ranks wait longer than it.

    Args:
        own: this rank's mailbox, where engine ranks acknowledge what they have read.
        control: mailbox of trainer rank 0, where they report.
    """

    def __init__(self, sequence: int, own: Mailbox, control: Mailbox, num_receivers: int, timeout_s: float) -> None:
        self._sequence = sequence
        self._own = own
        self._control = control
        self._num_receivers = num_receivers
        self._rows = set(range(num_receivers))
        self._timeout_s = timeout_s if own is control else 2 * timeout_s

    def deliver(self, bucket: int, descriptor: BucketDescriptor, arena: Tensor) -> None:
        """Send a published bucket in the arena to the readers that cannot map it; here there are none."""

    def wait(self, num_buckets: int) -> None:
        """Return when no reader needs the first `num_buckets` buckets any more."""
        wait = PollingWait(self._timeout_s, f"engines to read bucket {num_buckets - 1}", self._drop_exited)
        slowest = 0
        while True:
            released = [reader.released for reader in self._own.readers(self._sequence, self._num_receivers)]
            late = {row for row in self._rows if released[row] < num_buckets}
            if not late:
                return
            before, slowest = slowest, min(released[row] for row in late)
            if slowest != before:
                wait.progress()
            self._pause(wait, late)

    def _pause(self, wait: PollingWait, late: set[int]) -> None:
        """Wait a moment for `late` engine ranks; after the timeout rank 0 excludes them."""
        try:
            wait.pause()
        except TimeoutError:
            if self._own is not self._control:
                raise
            for row in late:
                self._control.exclude(self._sequence, row)
            self._rows -= late

    def _drop_exited(self) -> None:
        self._rows.difference_update([row for row in self._rows if self._control.is_lost(self._sequence, row)])
