"""Stack traces of running processes, also of stopped ones and of those that hang in compiled code."""

import faulthandler
import os
import signal
import subprocess
import sysconfig
import tempfile
import time
from pathlib import Path

from tidemill_trainer.stalls.process import ProcessState

TRACE_SIGNAL = signal.SIGUSR2
"""Signal at which a registered process writes its stack traces to its log."""
_PY_SPY_TIMEOUT_S = 20.0
_SIGNAL_TIMEOUT_S = 1.0


def enable_traces() -> None:
    """Write the stack traces of all threads to standard error at `TRACE_SIGNAL`, from now on."""
    faulthandler.register(TRACE_SIGNAL, all_threads=True)


def stack_trace(process: ProcessState, logs: Path, py_spy: Path | None = None) -> str:
    """Return the stack traces of the threads of a process on this machine, and how they were read.

    py-spy reads the memory of the process without its help. Where the system does not permit that, a process that
    called `enable_traces` writes them itself, unless it is stopped.

    Args:
        process: the process.
        logs: folder of the logs.
        py_spy: the command; None: that of this Python environment.
    """
    command = Path(sysconfig.get_path("scripts")) / "py-spy" if py_spy is None else py_spy
    problem = ""
    # Pausing fails for a stopped process. Without a pause, the stack of a busy process may change while it is read.
    for flags in (["--nonblocking"], []):
        try:
            done = subprocess.run(
                [str(command), "dump", *flags, "--pid", str(process.pid)],
                capture_output=True,
                text=True,
                timeout=_PY_SPY_TIMEOUT_S,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            problem = str(error)
            continue
        if done.returncode == 0:
            _, thread, threads = done.stdout.partition("\nThread ")  # the command, which comes first, may be long
            return f"(py-spy)\n{(thread + threads).strip()}"
        problem = " ".join(done.stderr.partition("Stack backtrace")[0].split())
        if process.is_stopped:
            break
    return f"(py-spy failed: {problem})\n{_own_trace(process, logs)}"


def _own_trace(process: ProcessState, logs: Path) -> str:
    if process.pid == os.getpid():
        with tempfile.TemporaryFile("w+") as file:
            faulthandler.dump_traceback(file)
            file.seek(0)
            return f"(faulthandler)\n{file.read().strip()}"
    if process.is_stopped:
        return "no stack trace: a stopped process cannot write it itself"
    log = logs / f"{process.log}.log"
    if not log.is_file() or not _catches(process.pid):
        return "no stack trace: the process does not write it itself"
    size = log.stat().st_size
    os.kill(process.pid, TRACE_SIGNAL)
    deadline = time.monotonic() + _SIGNAL_TIMEOUT_S
    while log.stat().st_size == size and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(0.05)  # the traces are written line by line
    with log.open("rb") as file:
        file.seek(size)
        text = file.read().decode(errors="replace").strip()
    return f"(faulthandler)\n{text}" if text else "no stack trace: the process did not react to a signal"


def _catches(pid: int) -> bool:
    """Return whether the process has a handler for `TRACE_SIGNAL`, which would kill it otherwise."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    caught = next(line for line in status.splitlines() if line.startswith("SigCgt:")).split()[1]
    return bool(int(caught, 16) >> (TRACE_SIGNAL - 1) & 1)
