"""What dead runs left on this machine: processes, and the files of their engines."""

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import psutil

from tidemill_trainer.rollout.engine_files import leftovers, remove_leftovers
from tidemill_trainer.run_dir import is_locked
from tidemill_trainer.stalls.process import descendants, registered

_EXIT_S = 5.0


def describe(run_dir: Path) -> tuple[str, ...]:
    """Return what dead runs left on this machine, in words.

    Args:
        run_dir: parent folder of the runs.
    """
    processes = [_name(process, run) for process, run in dead_processes(run_dir)]
    return (*processes, *(str(folder) for folder in leftovers()))


def clean(run_dir: Path) -> list[str]:
    """Kill processes of dead runs and remove the files of their engines; return what was removed, in words.

    What belongs to a live run or to another user is left alone.

    Args:
        run_dir: parent folder of the runs.
    """
    found = list(dead_processes(run_dir))
    removed = [_name(process, run) for process, run in found]
    for process, _ in found:
        process.kill()  # psutil compares the start time, so a new process with this id is left alone
    psutil.wait_procs([process for process, _ in found], timeout=_EXIT_S)
    return removed + [f"{folder} and its shared memory" for folder in remove_leftovers()]


def dead_processes(run_dir: Path) -> Iterator[tuple[psutil.Process, Path]]:
    """Yield the processes of this user that belong to dead runs, and the folders of these runs.

    They are those that a run has recorded, with the same start time, and their descendants. A run is dead if its driver
    was on this machine and nobody holds the lock of its folder.
    """
    for lock in sorted(run_dir.glob("*/lock")):
        run = lock.parent
        try:
            recorded = [process for each in registered(run / "logs") if (process := each.process()) is not None]
        except PermissionError:  # a run of another user
            continue
        if not recorded or is_locked(lock) or not lock.read_text().endswith(f" on {socket.gethostname()}"):
            continue
        for process in {member for each in recorded for member in (each, *descendants(each))}:
            if _owner(process) == os.getuid():
                yield process, run


def _owner(process: psutil.Process) -> int | None:
    try:
        return process.uids().real
    except psutil.NoSuchProcess:
        return None


def _name(process: psutil.Process, run: Path) -> str:
    try:
        return f"process {process.pid} ({process.name()}) of the run {run}"
    except psutil.NoSuchProcess:
        return f"process {process.pid} of the run {run}"
