"""A deadline for code of others that runs in this process."""

import math
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class DeadlineError(BaseException):
    """The deadline has passed. Not an `Exception`, so that an `except Exception` in that code does not swallow it."""


@contextmanager
def deadline(seconds: float) -> Iterator[None]:
    """Interrupts the block after `seconds` (`inf`: never), by the signal SIGALRM, so no thread or process can be left.

    Python code, sleeping and waiting for input are interrupted at once; a call into compiled code that does not look
    for signals, once it returns. A block that goes on nevertheless, after a bare `except:`, is interrupted again after
    as many seconds. A block that uses SIGALRM itself takes the deadline's place.

    Raises:
        DeadlineError: in the block, at the line where it was; behind the block if that has swallowed it.
        RuntimeError: this is not the main thread, which alone receives signals.
    """
    if math.isinf(seconds):
        yield
        return
    if threading.current_thread() is not threading.main_thread():
        raise RuntimeError(f"a deadline of {seconds:g} s needs the main thread; run there, or without a deadline (inf)")

    passed = False

    def interrupt(_signum: int, _frame: FrameType | None) -> None:
        nonlocal passed
        passed = True
        raise DeadlineError(f"no result within {seconds:g} s")

    started = time.monotonic()
    handler = signal.signal(signal.SIGALRM, interrupt)
    others_delay, others_interval = signal.setitimer(signal.ITIMER_REAL, seconds, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
        if others_delay > 0:  # somebody else's alarm, which still counts
            left = others_delay - (time.monotonic() - started)
            signal.setitimer(signal.ITIMER_REAL, max(left, 1e-3), others_interval)
    if passed:
        raise DeadlineError(f"no result within {seconds:g} s, and the interruption was swallowed")
