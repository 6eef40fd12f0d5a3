"""Other processes: polling waits for them, where they run, and whether they still do."""

import functools
import hashlib
import os
import time
from collections.abc import Callable
from pathlib import Path


class PollingWait:
    """Polling wait with back-off and a no-progress timeout.

    Args:
        timeout_s: longest time without progress.
        what: what is waited for, used in the error message.
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
        """Wait a moment before the next poll.

        Raises:
            TimeoutError: no progress for `timeout_s`.
        """
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


def has_exited(pid: int, location: int | None = None) -> bool:
    """Return whether the process is known to have exited, including zombies.

    Args:
        pid: process ID.
        location: where the process runs, None for here; a process of another machine is never known to have exited.
    """
    if location not in (None, here()):
        return False
    try:
        with open(f"/proc/{pid}/stat", "rb") as stat:
            return stat.read().rpartition(b")")[2].split()[0] in (b"Z", b"X")
    except (FileNotFoundError, ProcessLookupError):
        return True


def can_map(pid: int, location: int) -> bool:
    """Return whether this process can map memory of that process."""
    return location == here() and os.access(f"/proc/{pid}/fd", os.R_OK | os.X_OK)
