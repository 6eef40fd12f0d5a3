"""The mailbox of one trainer rank in shared memory, through which it and all engine ranks exchange their progress.

A mailbox is a memfd, so nothing is left behind when a process exits. Other processes of the same user open it as
`/proc/<pid>/fd/<n>` and compare its inode, because the descriptor number may belong to a later mailbox. It is large and
sparse: pages exist once they are written.

Every word has one writer. A word that announces something carries the sequence number of the update in its upper half
and is written after what it announces, by aligned 8-byte stores; readers read what it announces after it.
"""

import json
import mmap
import os
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tidemill_weight_update.control.channel import RemoteInput
from tidemill_weight_update.control.wait import has_exited

MAX_RECEIVERS = 256
MAX_TENSORS = 1 << 18
_REPLY_BYTES = 1 << 16
_ROW_WORDS = 8
_ROWS = 4096  # bytes
_REPLIES = 1 << 20
_CHECKSUMS = 128 << 20
_JOURNAL = 256 << 20
_TOTALS = 1 << 30
_TOTALS_STRIDE = 2 * MAX_TENSORS * 8
_SIZE = _TOTALS + MAX_RECEIVERS * _TOTALS_STRIDE

# Words written by the sender.
_PID, _TOTAL, _FAILED, _OPEN, _LISTING, _SLOTS = 0, 1, 2, 3, 4, 8
# Words of a receiver's row, written by the receiver.
_ACK, _STATE, _RECEIVER_PID, _REPLY_LENGTH = 0, 1, 2, 3
_OUT = 7  # excluded; written by trainer rank 0 in its own mailbox

IDLE, ATTACHED, CHECKED, COPIED, LOADED, UNCHANGED, MIXED = range(7)
"""States of a receiver. The last two mean failure: UNCHANGED before it changed any parameter; MIXED if it may hold a
mix of old and new weights.
"""

_LOW = (1 << 32) - 1


def reply_to_json(reply: dict[str, Any]) -> bytes:
    """Encode a reply. A long error is truncated; pass other long values through `fitting` first."""
    text = json.dumps(reply).encode()
    if len(text) > _REPLY_BYTES and "error" in reply:
        text = json.dumps(reply | {"error": reply["error"][:4096]}).encode()
    assert len(text) <= _REPLY_BYTES, f"a reply of {len(text)} bytes, there is room for {_REPLY_BYTES}"
    return text


def fitting(reasons: Mapping[str, str]) -> dict[str, str]:
    """Return as many name -> reason entries as fit into a reply; the last reason counts the omitted names."""
    kept: dict[str, str] = {}
    room = _REPLY_BYTES - 4096  # space for the other entries of the reply
    for name, reason in reasons.items():
        room -= len(json.dumps({name: reason}))
        if kept and room < 0:
            kept[next(reversed(kept))] += f"; {len(reasons) - len(kept)} more tensors are not named"
            break
        kept[name] = reason
    return kept


def _stamp(sequence: int, value: int) -> int:
    return sequence << 32 | value


def path_of(identity: tuple[int, int]) -> str:
    """Return the path by which other processes open the mailbox with this `Mailbox.identity`."""
    where, inode = identity
    return f"/proc/{where >> 32}/fd/{where & _LOW}#{inode}"


class Mailbox:
    """One process's view of a mailbox, from `create` or `open`. `Channel` documents the other methods."""

    remote_input: RemoteInput | None = None  # a process that opens a mailbox can also map what it announces

    def __init__(self, fd: int, path: str) -> None:
        self.path = path
        self._fd = fd
        self._map = mmap.mmap(fd, _SIZE)
        self._words = np.frombuffer(self._map, dtype=np.int64, count=_REPLIES // 8)
        self._rows = self._words[_ROWS // 8 :][: MAX_RECEIVERS * _ROW_WORDS].reshape(MAX_RECEIVERS, _ROW_WORDS)
        self.checksums = np.frombuffer(self._map, dtype=np.int64, count=(_JOURNAL - _CHECKSUMS) // 8, offset=_CHECKSUMS)

    @classmethod
    def create(cls) -> "Mailbox":
        fd = os.memfd_create("tidemill-mailbox")
        os.ftruncate(fd, _SIZE)
        box = cls(fd, path_of((os.getpid() << 32 | fd, os.fstat(fd).st_ino)))
        box._words[_PID] = os.getpid()
        return box

    @classmethod
    def open(cls, path: str) -> "Mailbox":
        """Open the mailbox of another process.

        Raises:
            RuntimeError: that process has exited or closed it, or runs on another machine, in another container or as
                another user.
        """
        file, _, inode = path.partition("#")
        try:
            fd = os.open(file, os.O_RDWR)
        except OSError as error:
            raise RuntimeError(
                f"cannot open the trainer's memory {file} ({error.strerror}): engine and trainer must run on one "
                f"machine, in one PID namespace and as one user, and the trainer must be alive; for engines on other "
                f"machines pass link=GroupLink(...) to WeightUpdater"
            ) from error
        if str(os.fstat(fd).st_ino) != inode:
            os.close(fd)
            raise RuntimeError(
                f"the trainer's memory {file} is closed (its file descriptor was reused): the WeightUpdater was "
                f"closed, or trainer and engine are in different PID namespaces; call update() again, or use "
                f"link=GroupLink(...)"
            )
        return cls(fd, path)

    def close(self) -> None:
        del self._words, self._rows, self.checksums
        self._map.close()
        os.close(self._fd)

    def is_current(self) -> bool:
        """Return whether `path` still leads to this mailbox."""
        file, _, inode = self.path.partition("#")
        try:
            return str(os.stat(file).st_ino) == inode
        except OSError:
            return False

    @property
    def identity(self) -> tuple[int, int]:
        """Owner's process ID and file descriptor in one number, and the inode of the file."""
        return self.owner_pid << 32 | self._fd, os.fstat(self._fd).st_ino

    @property
    def owner_pid(self) -> int:
        return int(self._words[_PID])

    def owner_has_exited(self) -> bool:
        return has_exited(self.owner_pid)

    # The sender's side.

    def begin(self, sequence: int) -> None:
        self._words[_TOTAL] = _stamp(sequence, _LOW)

    def write_journal(self, offset: int, text: bytes) -> None:
        end = offset + len(text)
        if _JOURNAL + end > _TOTALS:
            raise RuntimeError(
                f"the descriptions of the tensors need more than the {_TOTALS - _JOURNAL} bytes of the journal; send "
                f"fewer or larger tensors, or create a new WeightUpdater"
            )
        self._map[_JOURNAL + offset : _JOURNAL + end] = text

    def write_checksums(self, first: int, checksums: NDArray[np.int64]) -> None:
        self.checksums[first : first + len(checksums)] = checksums

    def announce(self, sequence: int, listing: tuple[int, int] | None) -> None:
        self._words[_LISTING], self._words[_LISTING + 1] = (0, 0) if listing is None else listing
        self._words[_OPEN] = _stamp(sequence, 1)

    def publish(self, sequence: int, bucket: int, place: tuple[int, int], arena: tuple[int, int] | None) -> None:
        slot = _SLOTS + 8 * (bucket % 2)
        self._words[slot + 1], self._words[slot + 2] = place
        self._words[slot + 3], self._words[slot + 4] = (0, 0) if arena is None else arena
        self._words[slot] = _stamp(sequence, bucket + 1)

    def finish(self, sequence: int, num_buckets: int) -> None:
        self._words[_TOTAL] = _stamp(sequence, num_buckets)

    def fail(self, sequence: int) -> None:
        self._words[_FAILED] = _stamp(sequence, 1)

    def exclude(self, sequence: int, receiver: int) -> None:
        self._rows[receiver, _OUT] = _stamp(sequence, 1)

    def is_excluded(self, sequence: int, receiver: int) -> bool:
        return int(self._rows[receiver, _OUT]) == _stamp(sequence, 1)

    def acknowledged(self, sequence: int, receiver: int) -> int:
        word = int(self._rows[receiver, _ACK])
        return word & _LOW if word >> 32 == sequence else 0

    def reply(self, receiver: int) -> dict[str, Any]:
        start = _REPLIES + receiver * _REPLY_BYTES
        return json.loads(self._map[start : start + int(self._rows[receiver, _REPLY_LENGTH])])

    def totals(self, receiver: int, num_tensors: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        start = _TOTALS + receiver * _TOTALS_STRIDE
        both = np.frombuffer(self._map, dtype=np.int64, count=2 * MAX_TENSORS, offset=start).reshape(2, MAX_TENSORS)
        return both[0, :num_tensors], both[1, :num_tensors]

    def write_totals(self, receiver: int, checksums: NDArray[np.int64], counts: NDArray[np.int64]) -> None:
        places = self.totals(receiver, len(checksums))
        places[0][:], places[1][:] = checksums, counts

    # The receivers' side.

    def listing(self, sequence: int) -> tuple[bool, tuple[int, int] | None]:
        if int(self._words[_OPEN]) != _stamp(sequence, 1):
            return False, None
        place = int(self._words[_LISTING]), int(self._words[_LISTING + 1])
        return True, place if place[1] else None

    def announced(self, sequence: int, bucket: int) -> tuple[tuple[int, int], tuple[int, int] | None] | None:
        slot = _SLOTS + 8 * (bucket % 2)
        if int(self._words[slot]) != _stamp(sequence, bucket + 1):
            return None
        _, offset, length, arena, arena_length = self._words[slot : slot + 5].tolist()
        return (offset, length), (arena, arena_length) if arena_length else None

    def read_journal(self, place: tuple[int, int]) -> bytes:
        offset, length = place
        return self._map[_JOURNAL + offset : _JOURNAL + offset + length]

    def sent(self, first: int, count: int) -> NDArray[np.int64]:
        return self.checksums[first : first + count]

    def num_buckets(self, sequence: int) -> int | None:
        total = int(self._words[_TOTAL])
        if total >> 32 != sequence:
            raise RuntimeError(
                f"the trainer cancelled update {sequence} before this engine started it; see the error of update() in "
                f"the trainer's log"
            )
        if int(self._words[_FAILED]) == _stamp(sequence, 1):
            raise RuntimeError("the trainer failed while sending; see the error in the trainer's log")
        return None if total & _LOW == _LOW else total & _LOW

    def is_at(self, sequence: int) -> bool:
        return int(self._words[_TOTAL]) >> 32 == sequence

    def acknowledge(self, sequence: int, receiver: int, num_buckets: int) -> None:
        if not self.is_at(sequence):  # another engine uses this row now
            return
        self._rows[receiver, _ACK] = _stamp(sequence, num_buckets)

    def report(self, sequence: int, receiver: int, state: int, reply: dict[str, Any]) -> None:
        text = reply_to_json(reply)
        start = _REPLIES + receiver * _REPLY_BYTES
        self._map[start : start + len(text)] = text
        self._rows[receiver, _REPLY_LENGTH] = len(text)
        self._rows[receiver, _RECEIVER_PID] = os.getpid()
        self._rows[receiver, _STATE] = _stamp(sequence, state)

    def state(self, sequence: int, receiver: int) -> int:
        word = int(self._rows[receiver, _STATE])
        return word & _LOW if word >> 32 == sequence else IDLE

    def receiver_pid(self, sequence: int, receiver: int) -> int:
        return int(self._rows[receiver, _RECEIVER_PID]) if self.state(sequence, receiver) != IDLE else 0

    def receiver_has_exited(self, sequence: int, receiver: int) -> bool:
        pid = self.receiver_pid(sequence, receiver)
        return pid != 0 and has_exited(pid)
