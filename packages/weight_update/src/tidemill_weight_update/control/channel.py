"""What one trainer rank and all engine ranks tell each other during updates, whatever carries it."""

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from tidemill_weight_update.control.descriptor import BucketDescriptor
from tidemill_weight_update.memory.handle import Memory
from tidemill_weight_update.plan.plan import CopyPlan

Place = tuple[int, int]
"""Offset and length of a piece of text in a trainer rank's journal."""


class RemoteInput(Protocol):
    """How an engine rank gets what lies in memory that it cannot map."""

    def pack(self, place: Place, descriptor: BucketDescriptor, plan: CopyPlan) -> BucketDescriptor:
        """The line at `place`, as if it held nothing but what `plan` takes of it, packed together."""
        ...

    def receive(
        self, sequence: int, receiver: int, bucket: int, place: Place, memory: Memory, check: Callable[[], None]
    ) -> Tensor:
        """uint8, in memory of this process: what the line from `pack` describes. Valid until the next call.

        Args:
            memory: where the trainer keeps the bucket.
            check: raises if waiting is of no use.

        Raises:
            RuntimeError: the connection broke, or nothing came for too long.
        """
        ...

    def close(self) -> None: ...


class Channel(Protocol):
    """A trainer rank's mailbox: `Mailbox` in shared memory, `StoreMailbox` over a network.

    Every value has one writer. What announces something carries the number of the update and is written after what it
    announces. Engine ranks report in the mailbox of trainer rank 0.

    Attributes:
        path: by which engine ranks open it.
        remote_input: on an engine rank: how it gets what it cannot map; None: it maps the trainer's memory.
    """

    path: str
    remote_input: RemoteInput | None

    @property
    def owner_pid(self) -> int: ...

    def owner_has_exited(self) -> bool:
        """Whether the trainer rank is known to have ended; only a process of the same machine can know that."""
        ...

    def is_current(self) -> bool:
        """Whether `path` still leads here."""
        ...

    def close(self) -> None: ...

    # The trainer rank writes.

    def begin(self, sequence: int) -> None:
        """Starts an update; what receivers of earlier ones still read or write here does not count."""
        ...

    def write_journal(self, offset: int, text: bytes) -> None:
        """Places a line of the journal; it never changes."""
        ...

    def write_checksums(self, first: int, checksums: NDArray[np.int64]) -> None:
        """Notes the checksums of a bucket, before it is published."""
        ...

    def announce(self, sequence: int, listing: Place | None) -> None:
        """Opens the update. `listing`: the journal line that lists all lines of the update, if they are known."""
        ...

    def publish(self, sequence: int, bucket: int, place: Place, arena: Place | None) -> None:
        """Announces a bucket, its line, and the line that describes its memory (None: `line` does)."""
        ...

    def finish(self, sequence: int, num_buckets: int) -> None:
        """Says how many buckets the update has."""
        ...

    def fail(self, sequence: int) -> None:
        """Says that no more buckets will come."""
        ...

    def exclude(self, sequence: int, receiver: int) -> None:
        """Says (in rank 0's mailbox) that nobody shall wait for `receiver`."""
        ...

    # Engine ranks write.

    def acknowledge(self, sequence: int, receiver: int, num_buckets: int) -> None:
        """Says that `receiver` needs the first `num_buckets` buckets no longer."""
        ...

    def report(self, sequence: int, receiver: int, state: int, reply: dict[str, Any]) -> None:
        """Makes `state` of `receiver` visible, with `reply`."""
        ...

    def write_totals(self, receiver: int, checksums: NDArray[np.int64], counts: NDArray[np.int64]) -> None:
        """Leaves what `receiver` has copied of each tensor; announced by the next `report`."""
        ...

    # All read.

    def is_at(self, sequence: int) -> bool:
        """Whether this is the update that goes on; in later ones, other engine ranks may have the same numbers."""
        ...

    def listing(self, sequence: int) -> tuple[bool, Place | None]:
        """Whether the update is open, and the journal line that lists its lines, if there is one."""
        ...

    def announced(self, sequence: int, bucket: int) -> tuple[Place, Place | None] | None:
        """The journal lines (its own, its memory's) of a bucket, or None if it is not there yet."""
        ...

    def read_journal(self, place: Place) -> bytes: ...

    def sent(self, first: int, count: int) -> NDArray[np.int64]:
        """The checksums of what was published, from index `first`: int64 [count]."""
        ...

    def num_buckets(self, sequence: int) -> int | None:
        """Number of buckets of the update; None: not known yet.

        Raises:
            RuntimeError: the mailbox belongs to another update, or the trainer rank has failed.
        """
        ...

    def is_excluded(self, sequence: int, receiver: int) -> bool: ...

    def acknowledged(self, sequence: int, receiver: int) -> int: ...

    def state(self, sequence: int, receiver: int) -> int: ...

    def reply(self, receiver: int) -> dict[str, Any]: ...

    def receiver_pid(self, sequence: int, receiver: int) -> int:
        """The process of `receiver`, 0 if it has not reported in this update."""
        ...

    def receiver_has_exited(self, sequence: int, receiver: int) -> bool:
        """Whether `receiver` is known to have ended after it reported; see `owner_has_exited`."""
        ...

    def totals(self, receiver: int, num_tensors: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """What `receiver` left of each tensor: checksums and element counts, int64 [num_tensors]."""
        ...
