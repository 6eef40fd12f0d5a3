"""The processes of a run: who they are, and what the kernel reports about them."""

import json
import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

_SAMPLE_S = 0.5
_REGISTRY = "processes.jsonl"
_STOPPED = (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
_WORDS = {
    psutil.STATUS_STOPPED: "stopped (state T)",
    psutil.STATUS_TRACING_STOP: "stopped by a debugger (state t)",
    psutil.STATUS_DISK_SLEEP: "in uninterruptible sleep, such as a disk access (state D)",
    psutil.STATUS_ZOMBIE: "dead (state Z)",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Registration:
    """A process that belongs to a run.

    Attributes:
        name: name of its log, such as "actor_0", or "driver".
        pid: process id.
        created_s: start of the process in seconds since the start of the machine, which does not change when the clock
            is set; a later process with the same id has another one.
        node: Ray's id of the node; empty without Ray.
    """

    name: str
    pid: int
    created_s: float
    node: str = ""

    @classmethod
    def of_this_process(cls, name: str, node: str = "") -> "Registration":
        pid = os.getpid()
        return cls(name=name, pid=pid, created_s=start_s(pid), node=node)

    def process(self) -> psutil.Process | None:
        """Return the process; None if it has exited, or is on another machine."""
        try:
            process = psutil.Process(self.pid)
            return process if start_s(self.pid) == self.created_s else None
        except (psutil.NoSuchProcess, OSError):
            return None


def start_s(pid: int) -> float:
    """Return the start of a process in seconds since the start of the machine. OSError if there is none."""
    fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()  # the name may contain anything
    return int(fields[19]) / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessState:
    """A process as the kernel sees it.

    Attributes:
        title: role in the run, such as "rank 1 of group 'actor'".
        host: name of its machine.
        pid: process id.
        status: status in psutil's words.
        cpu_s: CPU seconds since its start.
        cpu_share: CPU seconds per second during a short sample; above 1 with several threads.
        rss_bytes: resident memory.
        log: name of the log of the registered process that it is or descends from.
    """

    title: str
    host: str
    pid: int
    status: str
    cpu_s: float
    cpu_share: float
    rss_bytes: int
    log: str

    @property
    def is_stopped(self) -> bool:
        return self.status in _STOPPED

    @property
    def state(self) -> str:
        """The status in words."""
        if self.status in _WORDS:
            return _WORDS[self.status]
        return f"busy with {100 * self.cpu_share:.0f} % CPU" if self.cpu_share >= 0.05 else "idle"

    def __str__(self) -> str:
        return f"{self.title}, process {self.pid} on {self.host}, is {self.state}"


def register(logs: Path, registration: Registration) -> None:
    """Record a process in the folder of logs, so that a report finds it even if it does not respond."""
    with (logs / _REGISTRY).open("a") as file:
        file.write(json.dumps(asdict(registration)) + "\n")


def forget(logs: Path) -> None:
    """Create the folder of logs, or remove the record of the processes of an earlier attempt from it."""
    logs.mkdir(parents=True, exist_ok=True)
    (logs / _REGISTRY).unlink(missing_ok=True)


def registered(logs: Path) -> list[Registration]:
    """Return the processes that were recorded in the folder of logs, including those that have exited."""
    file = logs / _REGISTRY
    lines = file.read_text().splitlines(keepends=True) if file.is_file() else []
    return [Registration(**json.loads(line)) for line in lines if line.endswith("\n")]  # a full disk may cut the last


def role(name: str) -> str:
    """Return the role of a registered process for messages, as in the errors of a call to its group."""
    group, _, rank = name.rpartition("_")
    if group == "rollout":  # an engine, the only rank of its group
        return f"rank 0 of group {name!r}"
    if group == "episodes":
        return f"episode worker {rank}"
    return f"rank {rank} of group {group!r}" if rank.isdecimal() else name


def log_name(group: str, rank: int) -> str:
    """Return the name of the log of a rank; the group of an engine has one rank, and the log its name."""
    return group if is_engine(group) else f"{group}_{rank}"


def is_engine(group: str) -> bool:
    """Return whether a group of workers is an engine."""
    return group.startswith("rollout_")


def observe(registrations: Sequence[Registration]) -> list[ProcessState]:
    """Return the state of processes on this machine and of their descendants, each once. Takes about half a second."""
    owners = _owners(registrations)
    before = {process: _cpu_s(process) for process in owners}
    time.sleep(_SAMPLE_S)
    states = []
    for process, (owner, log) in owners.items():
        title = role(log) if process == owner else f"{_command(process)} below {role(log)}"
        states.append(_state(process, title, log, before[process]))
    return [state for state in states if state is not None]


def cpu_seconds(registrations: Sequence[Registration]) -> dict[str, float]:
    """Return the CPU seconds since its start of each process on this machine, with its descendants, by its name."""
    seconds: dict[str, float] = {}
    for process, (_, name) in _owners(registrations).items():
        seconds[name] = seconds.get(name, 0.0) + _cpu_s(process)
    return seconds


def _owners(registrations: Sequence[Registration]) -> dict[psutil.Process, tuple[psutil.Process, str]]:
    """Return the registered processes and their descendants, each with the registered one and its name."""
    owners: dict[psutil.Process, tuple[psutil.Process, str]] = {}
    for registration in registrations:
        process = registration.process()
        if process is not None:
            owners[process] = process, registration.name
    for process, owner in list(owners.items())[::-1]:  # the driver comes first and is the parent of Ray's
        for child in descendants(process):
            owners.setdefault(child, owner)
    return owners


def descendants(process: psutil.Process) -> list[psutil.Process]:
    """Return the children of a process and theirs; none if it has exited."""
    try:
        return process.children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def _command(process: psutil.Process) -> str:
    try:
        words = " ".join(process.cmdline()).split()
        return " ".join(word.rpartition("/")[2] for word in words)[:60].rstrip() if words else process.name()
    except psutil.Error:  # it has exited, or belongs to another user
        return "(unknown command)"


def _cpu_s(process: psutil.Process) -> float:
    try:
        times = process.cpu_times()
        return times.user + times.system
    except psutil.NoSuchProcess:
        return 0.0


def _state(process: psutil.Process, title: str, log: str, cpu_before_s: float) -> ProcessState | None:
    try:
        with process.oneshot():
            cpu_s = _cpu_s(process)
            return ProcessState(
                title=title,
                host=os.uname().nodename,
                pid=process.pid,
                status=process.status(),
                cpu_s=cpu_s,
                cpu_share=(cpu_s - cpu_before_s) / _SAMPLE_S,
                rss_bytes=process.memory_info().rss,
                log=log,
            )
    except psutil.NoSuchProcess:
        return None
