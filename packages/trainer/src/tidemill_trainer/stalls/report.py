"""The report of a stalled run: who waits for whom since when, and what every process does."""

import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tidemill_dispatch import CallTimeoutError, WorkerError

from tidemill_trainer.logs import tail
from tidemill_trainer.stalls.process import ProcessState, role
from tidemill_trainer.waits import ActiveWait

_LOG_LINES = 8


class StallError(RuntimeError):
    """A wait has expired. The message names the wait, its limit, the culprit and the file of the report."""


@dataclass(frozen=True, kw_only=True, slots=True)
class InspectedProcess:
    """A process with the stack traces of its threads."""

    state: ProcessState
    stack: str


@dataclass(frozen=True, kw_only=True, slots=True)
class StallReport:
    """What is known about a run that does not make progress.

    Attributes:
        reason: why the report was written.
        waits: the active waits, the outermost one first.
        last_progress: what ended last.
        error: error that ended the wait; None while it lasts.
        processes: all processes of the run.
        unreachable: nodes whose processes are unknown, with the reason.
        queues: state of the queues by owner.
        logs: folder of the logs.
    """

    reason: str
    waits: Sequence[ActiveWait]
    last_progress: str
    processes: Sequence[InspectedProcess]
    logs: Path
    error: BaseException | None = None
    unreachable: Sequence[str] = ()
    queues: Mapping[str, str] = field(default_factory=dict)

    def summary(self) -> str:
        """Return one line: who waits for whom, since when, and the culprit."""
        if not self.waits:
            return f"no active wait; {self.culprit()}"
        innermost = self.waits[-1]
        seconds = innermost.seconds()
        limit = innermost.wait.limit_after(seconds)
        return f"waiting for {innermost.wait.name} since {seconds:.0f} s ({limit}); {self.culprit()}"

    def culprit(self) -> str:
        """Describe the stopped processes, else the ranks that did not finish the call, else who is waited for."""
        states = [process.state for process in self.processes]
        stopped = [str(state) for state in states if state.is_stopped]
        if stopped:
            return "; ".join(stopped)
        late = late_ranks(self.error)
        found = [str(state) for state in states if state.title in late]
        if late:
            return "; ".join(found or [f"{title} did not finish" for title in late])
        return f"{self.waits[-1].wait.on} did not finish" if self.waits else "no process is stopped"

    def text(self) -> str:
        sections = [
            f"Report of {time.strftime('%Y-%m-%d %H:%M:%S')}: {self.reason}\n{self.summary()}",
            "Active waits, the outermost one first\n" + "\n".join(map(_wait_line, self.waits or ())),
            f"Last progress\n{self.last_progress}",
            *([f"Error\n{''.join(traceback.format_exception_only(self.error)).strip()}"] if self.error else []),
            "Processes\n" + "\n".join([_HEADER, *map(_process_line, self.processes), *self.unreachable]),
            *(
                ["Queues\n" + "\n".join(f"{owner}: {state}" for owner, state in self.queues.items())]
                if self.queues
                else []
            ),
            "Last lines of the logs\n" + "\n".join(map(_log_lines, sorted(self.logs.glob("*.log")))),
            "Stack traces\n" + "\n\n".join(map(_stack, self.processes)),
        ]
        return "\n\n".join(sections) + "\n"


def late_ranks(error: BaseException | None) -> list[str]:
    """Return the roles of the ranks that had not finished a call when it raised `error`."""
    if isinstance(error, CallTimeoutError | WorkerError):
        return [role(f"{error.group}_{rank}") for rank in error.still_running]
    return []


_HEADER = f"{'pid':>8} {'host':<16} {'CPU s':>8} {'RSS MiB':>8}  process"


def _process_line(process: InspectedProcess) -> str:
    state = process.state
    return (
        f"{state.pid:>8} {state.host:<16} {state.cpu_s:>8.1f} {state.rss_bytes / 2**20:>8.0f}  {state.title}: "
        f"{state.state}"
    )


def _wait_line(active: ActiveWait) -> str:
    seconds = active.seconds()
    return f"{seconds:8.1f} s  {active.wait.name}, by {active.wait.on} ({active.wait.limit_after(seconds)})"


def _log_lines(log: Path) -> str:
    return f"== {log.name}\n{tail(log, _LOG_LINES)}"


def _stack(process: InspectedProcess) -> str:
    return f"== {process.state.title}, process {process.state.pid}, {process.state.state} {process.stack}"
