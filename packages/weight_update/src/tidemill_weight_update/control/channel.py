"""The protocol between one trainer rank and all engine ranks, independent of its implementation."""

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from tidemill_weight_update.control.descriptor import BucketDescriptor
from tidemill_weight_update.memory.handle import Memory
from tidemill_weight_update.plan.plan import CopyPlan

Place = tuple[int, int]
"""Offset and length of a text in the journal of a trainer rank."""


class RemoteInput(Protocol):
    """How an engine rank receives what is in memory that it cannot map."""

    def pack(self, place: Place, descriptor: BucketDescriptor, plan: CopyPlan) -> BucketDescriptor:
        """Return the descriptor at `place`, reduced to what `plan` reads of it and packed together."""
        ...

    def receive(
        self, sequence: int, receiver: int, bucket: int, place: Place, memory: Memory, check: Callable[[], None]
    ) -> Tensor:
        """Receive the bytes that the descriptor from `pack` describes: uint8 in memory of this process, valid until the
        next call.

        Args:
            memory: where the trainer keeps the bucket.
            check: raises if the wait has become pointless.

        Raises:
            RuntimeError: the connection broke, or nothing arrived in time.
        """
        ...

    def close(self) -> None: ...


class Channel(Protocol):
    """A trainer rank's mailbox: `Mailbox` in shared memory, `StoreMailbox` over a network.

    Every value has one writer. A value that announces others carries the number of the update and is written after
    them. Engine ranks report in the mailbox of trainer rank 0.

    Attributes:
        path: path by which engine ranks open it.
        remote_input: on an engine rank, how it receives memory that it cannot map; None if it maps the trainer's
            memory.
    """

    path: str
    remote_input: RemoteInput | None

    @property
    def owner_pid(self) -> int: ...

    def owner_has_exited(self) -> bool:
        """Return whether the trainer rank is known to have exited; only a process of the same machine can know."""
        ...

    def is_current(self) -> bool:
        """Return whether `path` still leads to this mailbox."""
        ...

    def close(self) -> None: ...

    # The trainer rank writes.

    def begin(self, sequence: int) -> None:
        """Start an update. Receivers of earlier updates no longer count."""
        ...

    def write_journal(self, offset: int, text: bytes) -> None:
        """Write a text into the journal; it never changes afterwards."""
        ...

    def write_checksums(self, first: int, checksums: NDArray[np.int64]) -> None:
        """Write the checksums of a bucket, before it is published."""
        ...

    def announce(self, sequence: int, listing: Place | None) -> None:
        """Open the update. `listing` is the place of the list of all its descriptors, if they are known."""
        ...

    def publish(self, sequence: int, bucket: int, place: Place, arena: Place | None) -> None:
        """Announce a bucket: the place of its descriptor and of the description of its memory (None: the descriptor has
        it).
        """
        ...

    def finish(self, sequence: int, num_buckets: int) -> None:
        """Write the number of buckets of the update."""
        ...

    def fail(self, sequence: int) -> None:
        """Announce that no more buckets follow."""
        ...

    def exclude(self, sequence: int, receiver: int) -> None:
        """Mark `receiver` as excluded, in rank 0's mailbox: nobody waits for it any more."""
        ...

    # Engine ranks write.

    def acknowledge(self, sequence: int, receiver: int, num_buckets: int) -> None:
        """Report that `receiver` no longer needs the first `num_buckets` buckets."""
        ...

    def report(self, sequence: int, receiver: int, state: int, reply: dict[str, Any]) -> None:
        """Publish `state` of `receiver` together with `reply`."""
        ...

    def write_totals(self, receiver: int, checksums: NDArray[np.int64], counts: NDArray[np.int64]) -> None:
        """Write what `receiver` copied of each tensor; the next `report` announces it."""
        ...

    # All read.

    def is_at(self, sequence: int) -> bool:
        """Return whether this is the current update. In later updates, other engine ranks may have the same rows."""
        ...

    def listing(self, sequence: int) -> tuple[bool, Place | None]:
        """Return whether the update is open, and the place of the list of its descriptors, if there is one."""
        ...

    def announced(self, sequence: int, bucket: int) -> tuple[Place, Place | None] | None:
        """Return the places of a bucket's descriptor and of its memory's description; None before it is published."""
        ...

    def read_journal(self, place: Place) -> bytes: ...

    def sent(self, first: int, count: int) -> NDArray[np.int64]:
        """Return `count` checksums of published tensors, from index `first`: int64 [count]."""
        ...

    def num_buckets(self, sequence: int) -> int | None:
        """Return the number of buckets of the update, or None if it is not known yet.

        Raises:
            RuntimeError: the mailbox belongs to another update, or the trainer rank has failed.
        """
        ...

    def is_excluded(self, sequence: int, receiver: int) -> bool: ...

    def acknowledged(self, sequence: int, receiver: int) -> int: ...

    def state(self, sequence: int, receiver: int) -> int: ...

    def reply(self, receiver: int) -> dict[str, Any]: ...

    def receiver_pid(self, sequence: int, receiver: int) -> int:
        """Return the process ID of `receiver`, 0 if it has not reported in this update."""
        ...

    def receiver_has_exited(self, sequence: int, receiver: int) -> bool:
        """Return whether `receiver` is known to have exited after it reported; see `owner_has_exited`."""
        ...

    def totals(self, receiver: int, num_tensors: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return what `receiver` wrote for each tensor: checksums and element counts, int64 [num_tensors] each."""
        ...
