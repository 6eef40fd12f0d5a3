"""Boards, on which trainer ranks and engine ranks share small records and blobs of bytes, and waiting for processes.

Each trainer rank has a board. A record is a row of 64-bit words, a blob has a place in an area; each has one writer.
`mailbox.Mailbox` is the protocol: who writes which of them when.
"""

import functools
import hashlib
import mmap
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from tidemill_weight_update.memory import open_file

WORDS = 8
"""Words of a record: one cache line."""
MAX_RECEIVERS = 256
"""Engine ranks that a board in shared memory has room for."""
MAX_TENSORS = 1 << 18
"""Tensors of an update whose totals fit into shared memory."""
REPLY_BYTES = 1 << 16
"""Longest reply of an engine rank."""

Record = Literal["trainer", "reader", "report", "excluded"]
Area = Literal["declaration", "checksums", "replies", "totals", "parts"]


class LinkError(RuntimeError):
    """The connection to a board in a store broke."""


class Board(Protocol):
    """One process's view of a board."""

    path: str

    def put(self, record: Record, row: int, *words: int) -> None:
        """Write the words of a record, the first one last: whoever reads it finds the others."""
        ...

    def get(self, record: Record, row: int) -> list[int]:
        """Return all words of a record, the first one read first. Words that were never written are 0."""
        ...

    def get_rows(self, record: Record, num_rows: int) -> list[list[int]]:
        """Return all words of the first rows."""
        ...

    def write(self, area: Area, at: int, data: bytes | NDArray[np.int64]) -> None:
        """Write a blob; the record that announces it is put afterwards."""
        ...

    def read(self, area: Area, at: int, num_bytes: int) -> bytes | NDArray[np.uint8]:
        """Return a blob that was written at this place; the caller knows its length."""
        ...

    def is_current(self) -> bool:
        """Return whether `path` still leads to this board."""
        ...

    def close(self) -> None: ...


_FIRST: dict[Record, int] = {"trainer": 0, "reader": 1, "report": 1 + MAX_RECEIVERS, "excluded": 1 + 2 * MAX_RECEIVERS}
"""Row of the first record of each kind."""
_NUM_RECORDS = 1 + 3 * MAX_RECEIVERS
_TOTALS_END = (1 << 30) + 2 * MAX_RECEIVERS * MAX_TENSORS * 8
_AREAS: dict[Area, tuple[int, int, int]] = {
    "replies": (1 << 20, REPLY_BYTES, 128 << 20),
    "checksums": (128 << 20, 8, 256 << 20),
    "declaration": (256 << 20, 1, 1 << 30),
    "totals": (1 << 30, MAX_TENSORS * 8, _TOTALS_END),
}
"""First byte, bytes per place, and end of each area. Engines that map the trainer's memory need no "parts"."""


class SharedBoard:
    """A board in a memfd, so nothing is left behind when a process exits.

    Other processes of the same user open it as `/proc/<pid>/fd/<n>` and compare its inode, because the descriptor
    number may belong to a later board. It is large and sparse: pages exist once they are written. A word is stored and
    loaded at once, because it is aligned to 8 bytes.
    """

    def __init__(self, fd: int, path: str) -> None:
        self.path = path
        self._fd = fd
        memory = mmap.mmap(fd, _TOTALS_END)
        self._bytes = np.frombuffer(memory, np.uint8)
        self._words = memoryview(memory)[: _NUM_RECORDS * WORDS * 8].cast("q")  # its words are faster than an array's

    @staticmethod
    def is_path(path: str) -> bool:
        """Return whether `path` is that of a board in shared memory, and not in a store."""
        return path.startswith("/proc/")

    @classmethod
    def create(cls) -> "SharedBoard":
        fd = os.memfd_create("tidemill-board")
        os.ftruncate(fd, _TOTALS_END)
        return cls(fd, f"/proc/{os.getpid()}/fd/{fd}#{os.fstat(fd).st_ino}")

    @classmethod
    def open(cls, path: str) -> "SharedBoard":
        """Open the board of another process."""
        file, _, inode = path.partition("#")
        return cls(open_file(file, int(inode), os.O_RDWR), path)

    def put(self, record: Record, row: int, *words: int) -> None:
        place = (_FIRST[record] + row) * WORDS
        for index in range(len(words) - 1, -1, -1):
            self._words[place + index] = words[index]

    def get(self, record: Record, row: int) -> list[int]:
        place = (_FIRST[record] + row) * WORDS
        return [self._words[place], *self._words[place + 1 : place + WORDS].tolist()]

    def get_rows(self, record: Record, num_rows: int) -> list[list[int]]:
        return [self.get(record, row) for row in range(num_rows)]

    def write(self, area: Area, at: int, data: bytes | NDArray[np.int64]) -> None:
        first, size, end = _AREAS[area]
        start = first + at * size
        view = np.frombuffer(data, np.uint8)
        if start + len(view) > end:
            raise RuntimeError(
                f"the {area} of the tensors needs more than {end - first} bytes of shared memory; send fewer or larger "
                f"tensors, or create a new WeightUpdater"
            )
        self._bytes[start : start + len(view)] = view

    def read(self, area: Area, at: int, num_bytes: int) -> NDArray[np.uint8]:
        first, size, _ = _AREAS[area]
        start = first + at * size
        return self._bytes[start : start + num_bytes]

    def is_current(self) -> bool:
        file, _, inode = self.path.partition("#")
        try:
            return str(os.stat(file).st_ino) == inode
        except OSError:
            return False

    def close(self) -> None:
        """Close the file; the memory is released with the last array that `read` returned."""
        del self._bytes, self._words
        os.close(self._fd)


class PollingWait:
    """Polling wait with back-off and a no-progress timeout.

    Args:
        check: called about every 50 ms; raises if the wait has become pointless, for example because a process has
            exited.
    """

    def __init__(self, timeout_s: float, what: str, check: Callable[[], None]) -> None:
        self._timeout_s = timeout_s
        self._what = what
        self._check = check
        self.progress()

    def progress(self) -> None:
        """Restart the timeout and poll without delay again."""
        self._started = self._checked = time.monotonic()
        self._polls = 0

    def pause(self) -> None:
        """Wait a moment before the next poll."""
        self._polls += 1
        if self._polls < 50:
            return
        now = time.monotonic()
        time.sleep(50e-6 if now - self._started < 0.5 else 1e-3)
        if now - self._checked > 0.05:
            self._checked = now
            self._check()
            if now - self._started > self._timeout_s:
                raise TimeoutError(
                    f"timed out: waited {self._timeout_s:g} s without progress for {self._what}; raise timeout_s of "
                    f"WeightUpdater, or check those processes"
                )


def own_process() -> tuple[int, int]:
    """Return the ID of this process and its location, see `here`."""
    return os.getpid(), here()


@functools.cache
def here() -> int:
    """Return a number for this machine since its last boot, and this process's PID namespace."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text()
    text = f"{boot}/{os.stat('/proc/self/ns/pid').st_ino}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest())


def has_exited(pid: int, location: int) -> bool:
    """Return whether the process is known to have exited, including zombies; arguments of `process_state`."""
    return process_state(pid, location) == "has exited"


def process_state(pid: int, location: int) -> str:
    """Return "has exited" (also for a zombie), "is stopped" (by a signal or a debugger), or "" if neither is known.

    Args:
        location: where the process runs, see `here`; of a process of another machine nothing is known.
    """
    if location != here():
        return ""
    try:
        with open(f"/proc/{pid}/stat", "rb") as stat:
            letter = stat.read().rpartition(b")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "has exited"
    return {b"Z": "has exited", b"X": "has exited", b"T": "is stopped", b"t": "is stopped"}.get(letter, "")


def can_map(pid: int, location: int) -> bool:
    """Return whether this process can map memory of that process."""
    return location == here() and os.access(f"/proc/{pid}/fd", os.R_OK | os.X_OK)
