"""Waiting for other processes."""

import time
from collections.abc import Callable


class PollingWait:
    """A wait that polls: at once at first, then ever more seldom, with a deadline that progress moves on.

    Args:
        timeout_s: longest time without progress.
        what: what is waited for, for the message.
        check: called about once in 50 ms; raises if waiting is of no use (a process has ended, say).
    """

    def __init__(self, timeout_s: float, what: str, check: Callable[[], None]) -> None:
        self._timeout_s = timeout_s
        self._what = what
        self._check = check
        self.progress()

    def progress(self) -> None:
        self._started = self._checked = time.monotonic()
        self._polls = 0

    def pause(self) -> None:
        """Raises TimeoutError: no progress for too long."""
        self._polls += 1
        if self._polls < 50:
            return
        now = time.monotonic()
        time.sleep(50e-6 if now - self._started < 0.5 else 1e-3)
        if now - self._checked > 0.05:
            self._checked = now
            self._check()
            if now - self._started > self._timeout_s:
                raise TimeoutError(f"waited {self._timeout_s:g} s for {self._what}")


def has_exited(pid: int) -> bool:
    """Whether the process has ended, also while nobody has collected its exit status."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as stat:
            return stat.read().rpartition(b")")[2].split()[0] in (b"Z", b"X")
    except (FileNotFoundError, ProcessLookupError):
        return True
