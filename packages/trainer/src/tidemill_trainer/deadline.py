"""A deadline for user code that runs in this process."""

import math
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class DeadlineError(BaseException):
    """The deadline has expired. A `BaseException`, so that `except Exception` in user code does not catch it."""


@contextmanager
def deadline(seconds: float) -> Iterator[None]:
    """Interrupt the block after `seconds` (`inf`: never) with the signal SIGALRM, without a thread or a process.

    Python code, `sleep` and input are interrupted at once; compiled code that does not check for signals is interrupted
    when it returns. A block that continues after a bare `except:` is interrupted again after the same time. A block
    that uses SIGALRM itself replaces the deadline.

    Raises:
        DeadlineError: in the block, at the line that was running; after the block if the block caught it.
        RuntimeError: this is not the main thread, and only the main thread receives signals.
    """
    if math.isinf(seconds):
        yield
        return
    if threading.current_thread() is not threading.main_thread():
        raise RuntimeError(
            f"a deadline of {seconds:g} s requires the main thread, got thread {threading.current_thread().name!r}; "
            "call it in the main thread, or without a deadline (inf)"
        )

    is_expired = False

    def interrupt(_signum: int, _frame: FrameType | None) -> None:
        nonlocal is_expired
        is_expired = True
        raise DeadlineError(f"no result within {seconds:g} s")

    start = time.monotonic()
    handler = signal.signal(signal.SIGALRM, interrupt)
    previous_delay, previous_interval = signal.setitimer(signal.ITIMER_REAL, seconds, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
        if previous_delay > 0:  # restore the alarm of other code
            remaining = previous_delay - (time.monotonic() - start)
            signal.setitimer(signal.ITIMER_REAL, max(remaining, 1e-3), previous_interval)
    if is_expired:
        raise DeadlineError(f"no result within {seconds:g} s, and the code caught the interruption")
