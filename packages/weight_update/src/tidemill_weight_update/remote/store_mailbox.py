"""A trainer rank's mailbox in a store that processes of other machines can reach.

What `Mailbox` keeps in words of shared memory is one value per writer and reader here: the status of the trainer rank,
the state of each engine rank, and the status of each engine rank for each trainer rank. Values are JSON, or int64 as
raw bytes.
"""

import json
import os
import threading
from collections.abc import Collection
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tidemill_weight_update.control.channel import Place, RemoteInput
from tidemill_weight_update.control.mailbox import IDLE, reply_to_json
from tidemill_weight_update.control.wait import has_exited
from tidemill_weight_update.remote.location import here
from tidemill_weight_update.transport.link_store import LinkError, LinkStore

_KEPT_BYTES = 4096
"""Journal texts up to this length are cached: descriptions of memory, which are read with every bucket."""


@dataclass(frozen=True, slots=True)
class SenderStatus:
    """Status of a trainer rank.

    Attributes:
        location: where the process runs, from `location.here`.
        pid: process ID.
        sequence: number of the update.
        is_open: whether the update is open.
        has_failed: whether the trainer rank failed in this update.
        listing: place of the list of all descriptors, if they are known.
        total: number of buckets of the update, if it is known.
        slots: last even-numbered and last odd-numbered bucket: number, place of its descriptor, place of its memory.
    """

    location: str
    pid: int
    sequence: int = 0
    is_open: bool = False
    has_failed: bool = False
    listing: Place | None = None
    total: int | None = None
    slots: tuple[tuple[int, Place, Place | None] | None, ...] = (None, None)


@dataclass(frozen=True, slots=True)
class ReceiverStatus:
    """Status of an engine rank, written for one trainer rank.

    Attributes:
        sequence: number of the update.
        released: number of buckets that it no longer needs.
        maps: whether it maps the trainer's memory.
        wanted: index of the bucket that it waits for, -1 for none.
        wire: number of its wire to the trainer rank.
        parts: hash and length of the text that lists the parts it reads of the bucket.
    """

    sequence: int = 0
    released: int = 0
    maps: bool = False
    wanted: int = -1
    wire: int = 0
    parts: Place = (0, 0)


@dataclass(frozen=True, slots=True)
class _Report:
    sequence: int = 0
    state: int = IDLE
    location: str = ""
    pid: int = 0
    reply: dict[str, Any] = field(default_factory=dict)


class StoreMailbox:
    """One process's view of the mailbox of trainer rank `rank`; see `Channel`.

    Args:
        store: store that all processes of the link share.
        path: path by which engine ranks open the mailbox.
        rank: the trainer rank.
    """

    def __init__(self, store: LinkStore, path: str, rank: int) -> None:
        self.path = path
        self.rank = rank
        self.store = store
        self.remote_input: RemoteInput | None = None
        self._sender_status = SenderStatus(location=here(), pid=os.getpid())
        self._receiver_status = ReceiverStatus()
        self._num_receivers = 0
        self._read: dict[Place, bytes] = {}
        self._excluded: tuple[int, list[int]] = (0, [])
        self._lock = threading.Lock()  # several threads may exclude engines

    def is_current(self) -> bool:
        return not self.store.is_broken

    def close(self) -> None:
        """Close the input of this mailbox; the owner of the store closes the store."""
        if self.remote_input is not None:
            self.remote_input.close()
            self.remote_input = None  # breaks a reference cycle that would keep the store open until garbage collection

    # The trainer rank writes.

    def make_room(self, num_receivers: int) -> None:
        """Write the initial values of further engine ranks, before anybody reads them."""
        for row in range(self._num_receivers, num_receivers):
            self.store.set(self._receiver_status_key(row), _to_json(ReceiverStatus()))
            if self.rank == 0:
                self.store.set(_state_key(row), _to_json(_Report()))
        if self.rank == 0 and not self._num_receivers:
            self.store.set("excluded", json.dumps(self._excluded))
        self._num_receivers = max(self._num_receivers, num_receivers)

    def begin(self, sequence: int) -> None:
        self._write_sender_status(SenderStatus(self._sender_status.location, self._sender_status.pid, sequence))

    def write_journal(self, offset: int, text: bytes) -> None:
        self.store.write(f"journal{self.rank}/{offset}", text)

    def write_checksums(self, first: int, checksums: NDArray[np.int64]) -> None:
        self.store.write(f"checksums{self.rank}/{first}", checksums.astype("<i8").tobytes())

    def announce(self, sequence: int, listing: Place | None) -> None:
        self._write_sender_status(replace(self._sender_status, is_open=True, listing=listing))

    def publish(self, sequence: int, bucket: int, place: Place, arena: Place | None) -> None:
        slots = list(self._sender_status.slots)
        slots[bucket % 2] = bucket, place, arena
        self._write_sender_status(replace(self._sender_status, slots=tuple(slots)))

    def finish(self, sequence: int, num_buckets: int) -> None:
        self._write_sender_status(replace(self._sender_status, total=num_buckets))

    def fail(self, sequence: int) -> None:
        try:
            self._write_sender_status(replace(self._sender_status, has_failed=True))
        except LinkError:
            return  # The original error is raised by the caller; engines that cannot read it time out.

    def exclude(self, sequence: int, receiver: int) -> None:
        with self._lock:
            rows = self._excluded[1] if self._excluded[0] == sequence else []
            self._excluded = sequence, [*rows, receiver]
            self.store.set("excluded", json.dumps(self._excluded))

    # Engine ranks write.

    def acknowledge(self, sequence: int, receiver: int, num_buckets: int) -> None:
        maps = self.remote_input is None
        self._write_receiver_status(
            receiver, replace(self._receiver_status, sequence=sequence, released=num_buckets, maps=maps, wanted=-1)
        )

    def request_bucket(self, sequence: int, receiver: int, bucket: int, *, wire: int, parts: Place) -> None:
        """Request a bucket; see `ReceiverStatus`."""
        released = self._receiver_status.released if self._receiver_status.sequence == sequence else 0
        self._write_receiver_status(receiver, ReceiverStatus(sequence, released, False, bucket, wire, parts))

    def report(self, sequence: int, receiver: int, state: int, reply: dict[str, Any]) -> None:
        report = _Report(sequence, state, here(), os.getpid(), json.loads(reply_to_json(reply)))
        self.store.set(_state_key(receiver), _to_json(report))

    def write_totals(self, receiver: int, checksums: NDArray[np.int64], counts: NDArray[np.int64]) -> None:
        self.store.write(f"totals/{receiver}", np.concatenate([checksums, counts]).astype("<i8").tobytes())

    # All read.

    @property
    def owner_pid(self) -> int:
        return self.sender_status().pid

    def sender_status(self) -> SenderStatus:
        fields = json.loads(self.store.get(f"sender_status{self.rank}"))
        fields["listing"] = _place(fields["listing"])
        fields["slots"] = tuple(
            None if slot is None else (slot[0], _place(slot[1]), _place(slot[2])) for slot in fields["slots"]
        )
        return SenderStatus(**fields)

    def owner_has_exited(self) -> bool:
        sender_status = self.sender_status()
        return sender_status.location == here() and has_exited(sender_status.pid)

    def is_at(self, sequence: int) -> bool:
        return self.sender_status().sequence == sequence

    def listing(self, sequence: int) -> tuple[bool, Place | None]:
        sender_status = self.sender_status()
        is_open = sender_status.sequence == sequence and sender_status.is_open
        return is_open, sender_status.listing if is_open else None

    def announced(self, sequence: int, bucket: int) -> tuple[Place, Place | None] | None:
        sender_status = self.sender_status()
        slot = sender_status.slots[bucket % 2]
        if sender_status.sequence != sequence or slot is None or slot[0] != bucket:
            return None
        return slot[1:]

    def read_journal(self, place: Place) -> bytes:
        if place not in self._read:
            text = self.store.read(f"journal{self.rank}/{place[0]}", place[1])
            if place[1] > _KEPT_BYTES:
                return text
            self._read[place] = text
        return self._read[place]

    def sent(self, first: int, count: int) -> NDArray[np.int64]:
        return np.frombuffer(self.store.read(f"checksums{self.rank}/{first}", 8 * count), "<i8")

    def num_buckets(self, sequence: int) -> int | None:
        sender_status = self.sender_status()
        if sender_status.sequence != sequence:
            raise RuntimeError(
                f"the trainer cancelled update {sequence} before this engine started it; see the error of update() in "
                f"the trainer's log"
            )
        if sender_status.has_failed:
            raise RuntimeError("the trainer failed while sending; see the error in the trainer's log")
        return sender_status.total

    def is_excluded(self, sequence: int, receiver: int) -> bool:
        of, rows = json.loads(self.store.get("excluded"))
        return of == sequence and receiver in rows

    def acknowledged(self, sequence: int, receiver: int) -> int:
        return self.statuses(sequence, [receiver])[receiver].released

    def statuses(self, sequence: int, rows: Collection[int]) -> dict[int, ReceiverStatus]:
        """Return the statuses that engine ranks wrote for this trainer rank in this update."""
        texts = self.store.multi_get([self._receiver_status_key(row) for row in rows]) if rows else []
        statuses = {}
        for row, text in zip(rows, texts, strict=True):
            fields = json.loads(text)
            status = ReceiverStatus(**fields | {"parts": tuple(fields["parts"])})
            statuses[row] = status if status.sequence == sequence else ReceiverStatus()
        return statuses

    def state(self, sequence: int, receiver: int) -> int:
        report = self._report(receiver)
        return report.state if report.sequence == sequence else IDLE

    def reply(self, receiver: int) -> dict[str, Any]:
        return self._report(receiver).reply

    def receiver_pid(self, sequence: int, receiver: int) -> int:
        report = self._report(receiver)
        return report.pid if report.sequence == sequence else 0

    def receiver_has_exited(self, sequence: int, receiver: int) -> bool:
        report = self._report(receiver)
        return report.sequence == sequence and report.location == here() and has_exited(report.pid)

    def totals(self, receiver: int, num_tensors: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        both = np.frombuffer(self.store.read(f"totals/{receiver}", 16 * num_tensors), "<i8").reshape(2, num_tensors)
        return both[0], both[1]

    def _report(self, receiver: int) -> _Report:
        return _Report(**json.loads(self.store.get(_state_key(receiver))))

    def _write_sender_status(self, sender_status: SenderStatus) -> None:
        self._sender_status = sender_status
        self.store.set(f"sender_status{self.rank}", _to_json(sender_status))

    def _write_receiver_status(self, receiver: int, status: ReceiverStatus) -> None:
        self._receiver_status = status
        self.store.set(self._receiver_status_key(receiver), _to_json(status))

    def _receiver_status_key(self, receiver: int) -> str:
        return f"status{self.rank}/{receiver}"


def _state_key(receiver: int) -> str:
    return f"state/{receiver}"


def _to_json(value: SenderStatus | ReceiverStatus | _Report) -> str:
    return json.dumps(asdict(value), separators=(",", ":"))


def _place(item: list[int] | None) -> Place | None:
    return None if item is None else (item[0], item[1])
