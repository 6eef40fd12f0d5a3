"""The watch over a run: names its waits on the terminal, and reports those that expire."""

import os
import select
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ray
from tidemill_dispatch import WorkerError

from tidemill_trainer.episodes import EpisodeError
from tidemill_trainer.progress import Progress
from tidemill_trainer.stalls.inspection import DRIVER, inspect_nodes, queue_states
from tidemill_trainer.stalls.process import ProcessState, Registration, observe, registered
from tidemill_trainer.stalls.report import StallError, StallReport, late_ranks
from tidemill_trainer.waits import ActiveWait, Waits

REPORT_SIGNAL = signal.SIGUSR1
"""Signal at which the driver writes a report and continues."""
_FIRST_LINE_S = 30.0
_LINE_EVERY_S = 60.0
_POLL_S = 1.0


class Watch:
    """Watches the waits of a run during a `with` block, in a thread of its own.

    - A line on the terminal names a wait that lasts 30 s, and again each minute.
    - At `REPORT_SIGNAL`, when such a line finds a stopped process, and when a wait expires, a report is written to
      `stall.txt`, the newest one first.

    The block raises `StallError` from the error of a wait that has expired, or that ended while a process was stopped.

    Args:
        waits: the waits of the driver.
        logs: folder of the logs.
        progress: terminal output.
        queues: returns references to the descriptions of the queues of the run, by owner.
        each_second: called each second in the thread.
    """

    def __init__(
        self,
        waits: Waits,
        logs: Path,
        progress: Progress,
        queues: Callable[[], Mapping[str, Any]] = dict,
        each_second: Callable[[], None] | None = None,
    ) -> None:
        self.waits = waits
        self.report = logs / "stall.txt"
        self._logs = logs
        self._progress = progress
        self._queues = queues
        self._each_second = each_second
        self._writing = threading.Lock()
        self._shown: tuple[float, float] = (0.0, 0.0)  # start of a wait, and when the next line is due
        self._reported: set[int] = set()  # stopped processes

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Watch during the block."""
        reading, writing = os.pipe()
        thread = threading.Thread(target=self._run, args=(reading,), name="watch", daemon=True)
        with _signal_to(writing):
            thread.start()
            try:
                yield
            except Exception as error:
                active = self.waits.active_at(error)
                if not active or not (_has_expired(active[-1], error) or self._stopped()):
                    raise
                raise StallError(f"{self.write('a wait has expired', active, error)}{_cause(error)}") from error
            finally:
                os.close(writing)  # the thread reads the end of the pipe
                thread.join()
                os.close(reading)

    def write(self, reason: str, active: Sequence[ActiveWait] | None = None, error: BaseException | None = None) -> str:
        """Write a report; return its summary and where it is.

        Args:
            reason: why the report is written.
            active: the waits to show; None: those that are active now.
            error: error that ended the innermost one.
        """
        here = ray.get_runtime_context().get_node_id() if ray.is_initialized() else ""
        driver = Registration.of_this_process(DRIVER, here)
        processes, unreachable = inspect_nodes([driver, *registered(self._logs)], self._logs, here=here)
        report = StallReport(
            reason=reason,
            waits=self.waits.active() if active is None else active,
            last_progress=self.waits.last_progress(),
            processes=processes,
            logs=self._logs,
            error=error,
            unreachable=unreachable,
            queues=queue_states(self._queues()),
        )
        with self._writing:
            try:
                earlier = self.report.read_text() if self.report.is_file() else ""
                self.report.write_text(report.text() + (f"\n{'=' * 80}\n\n{earlier}" if earlier else ""))
            except OSError as problem:  # such as a full disk; the summary is more important
                return f"{report.summary()}\nThe report cannot be written: {problem}"
        return f"{report.summary()}\nStack traces and the state of all processes are in {self.report}"

    def stack_trace(self, name: str) -> str:
        """Return the stack traces of a process of the run, by the name of its log; empty if it is gone."""
        found = [registration for registration in registered(self._logs) if registration.name == name]
        here = ray.get_runtime_context().get_node_id()
        processes, _ = inspect_nodes(found[-1:], self._logs, here=here)
        return "\n".join(process.stack for process in processes if process.state.pid == found[-1].pid)

    def _run(self, signals: int) -> None:
        failures: set[str] = set()
        while True:
            readable, _, _ = select.select([signals], [], [], _POLL_S)
            received = os.read(signals, 4096) if readable else b"\0"
            if not received:
                return
            try:
                self._look(received)
            except Exception as error:  # noqa: BLE001 - shown once; the later waits are watched, too
                text = f"the watch over the run failed with {type(error).__name__}: {error}; it continues"
                if text not in failures:
                    self._progress.warn(text)
                failures.add(text)

    def _look(self, received: bytes) -> None:
        """Write a report if one was requested, and a line about a wait if it is due."""
        if REPORT_SIGNAL in received:
            self._progress.info(self.write(f"requested by {REPORT_SIGNAL.name}"))
        if self._each_second is not None:
            self._each_second()
        active = self.waits.active()
        if not active:
            return
        innermost = active[-1]
        since, due = self._shown
        if since != innermost.since_s:
            due = innermost.since_s + _FIRST_LINE_S
        is_due = time.monotonic() >= due
        self._shown = innermost.since_s, due + _LINE_EVERY_S if is_due else due
        if not is_due:
            return
        stopped = {state.pid for state in self._stopped()}
        if stopped <= self._reported:
            self._progress.info(_line(innermost), style="dim")
        else:
            self._reported |= stopped
            self._progress.warn(self.write("a process is stopped"))

    def _stopped(self) -> list[ProcessState]:
        """Return the stopped processes of the run on this machine."""
        states = observe([Registration.of_this_process(DRIVER), *registered(self._logs)])
        return [state for state in states if state.is_stopped]


def _has_expired(active: ActiveWait, error: Exception) -> bool:
    """Return whether an error means that a wait has expired, or that ranks of a call hang after another one failed."""
    if isinstance(error, TimeoutError) or late_ranks(error):
        return True
    limit = active.wait.worker_limit
    if isinstance(error, EpisodeError) and not error.is_of_engine:  # many episodes may take longer than one
        return False
    return isinstance(error, WorkerError | EpisodeError) and limit is not None and active.seconds() >= limit.seconds


def _cause(error: Exception) -> str:
    """Return the text of an error that is more than a timeout, without a remote traceback."""
    text = str(error).partition("\nremote traceback")[0]
    return "" if isinstance(error, TimeoutError) else f"\nThe wait ended with {type(error).__name__}: {text}"


def _line(active: ActiveWait) -> str:
    seconds = active.seconds()
    return (
        f"waiting for {active.wait.name} by {active.wait.on} since {seconds:.0f} s ({active.wait.limit_after(seconds)})"
    )


@contextmanager
def _signal_to(pipe: int) -> Iterator[None]:
    """Write the numbers of received signals to a pipe, at once and even if the main thread hangs in compiled code."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    os.set_blocking(pipe, False)
    handler = signal.signal(REPORT_SIGNAL, lambda _signum, _frame: None)  # the default is to kill the process
    usual = signal.set_wakeup_fd(pipe, warn_on_full_buffer=False)
    try:
        yield
    finally:
        signal.set_wakeup_fd(usual)
        signal.signal(REPORT_SIGNAL, handler)
