"""The facts of a node. They are read without torch, in a fraction of a second."""

import hashlib
import importlib.util
import os
import platform
import resource
import shutil
import socket
import struct
import subprocess
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import psutil

_PACKAGES = ("torch", "sglang", "ray", "transformers")
_OWN = ("trainer", "dataproto", "dispatch", "engines", "algorithms", "weight_update", "rollout", "sglang_cpu")
_MAX_HEADER_BYTES = 100 << 20
_NVIDIA_SMI_S = 20.0
_MIB = 2**20


@dataclass(frozen=True, kw_only=True, slots=True)
class GPU:
    """A GPU. `processes` has the id and the name of each process that uses it, of all users."""

    index: int
    total_bytes: int
    free_bytes: int
    processes: tuple[tuple[int, str], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeFacts:
    """What is true of a node.

    Attributes:
        name: host name and, in a cluster, address; names the node in findings.
        address: address of the node in the cluster; the loopback address for a machine without a cluster.
        interface: network interface with this address; None if none has it.
        versions: version of Python and of each package that matters; "none" if it is not installed.
        source: hash of the source files of tidemill's packages.
        model: digest of each file of the model, by name; a text that says why it cannot be read; None without a model.
        num_cpus: CPUs that this process may use.
        shared_memory_bytes: size of /dev/shm.
        open_files: soft limit of open files of a process.
        gpus: its GPUs.
        leftovers: what dead runs left on it, in words.
    """

    name: str
    address: str
    interface: str | None
    versions: dict[str, str]
    source: str
    model: dict[str, str] | str | None
    num_cpus: int
    shared_memory_bytes: int
    open_files: int
    gpus: tuple[GPU, ...] = ()
    leftovers: tuple[str, ...] = ()


def read_facts(address: str | None, model: str | None, leftovers: tuple[str, ...] = ()) -> NodeFacts:
    """Read the facts of this machine.

    Args:
        address: its address in the cluster; None without a cluster.
        model: folder of the model; None without one.
        leftovers: what dead runs left on it.
    """
    host = socket.gethostname()
    return NodeFacts(
        name=host if address is None else f"{host} ({address})",
        address=address or "127.0.0.1",
        interface=interface_of(address or "127.0.0.1"),
        versions={"python": platform.python_version()} | {name: _version(name) for name in _distributions()},
        source=_hash_of_source(),
        model=None if model is None else digests(Path(model)),
        num_cpus=len(os.sched_getaffinity(0)),
        shared_memory_bytes=_size(Path("/dev/shm")),
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        gpus=read_gpus(),
        leftovers=leftovers,
    )


def digests(folder: Path) -> dict[str, str] | str:
    """Return a digest of each file of a model by name, or why they cannot be read.

    The digest of `config.json` is that of its content; of safetensors files, of their size and header; of others, of
    their size.
    """
    try:
        if not (folder / "config.json").is_file():
            return f"found no config.json in {folder}"
        return {path.name: _digest(path) for path in sorted(folder.iterdir()) if path.is_file()}
    except OSError as error:
        return f"cannot read {folder}: {error}"


def _digest(path: Path) -> str:
    size = path.stat().st_size
    content = b""
    with path.open("rb") as file:
        if path.name == "config.json":
            content = file.read()
        elif path.suffix == ".safetensors" and size >= 8:
            (length,) = struct.unpack("<Q", file.read(8))
            content = file.read(min(length, _MAX_HEADER_BYTES))
    return hashlib.sha256(f"{size} ".encode() + content).hexdigest()[:16]


def _distributions() -> list[str]:
    return [*_PACKAGES, *(f"tidemill-{name.replace('_', '-')}" for name in _OWN)]


def _version(distribution: str) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return "none"


def _hash_of_source() -> str:
    found = hashlib.sha256()
    for name in _OWN:
        spec = importlib.util.find_spec(f"tidemill_{name}")  # of a package that is not imported by this
        for root in () if spec is None else spec.submodule_search_locations or ():
            for path in sorted(Path(root).rglob("*.py")):
                found.update(f"{path.relative_to(root)}\n".encode() + path.read_bytes())
    return found.hexdigest()[:16]


def _size(folder: Path) -> int:
    return shutil.disk_usage(folder).total if folder.is_dir() else 0


def interface_of(address: str) -> str | None:
    """Return the network interface of this machine that has an address; None if none has it."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(each.address == address for each in addresses):
            return name
    return None


def read_gpus(*, visible: str | None = None) -> tuple[GPU, ...]:
    """Return the GPUs as nvidia-smi reports them; none where it is not installed or finds no driver.

    Args:
        visible: only these GPUs, as CUDA_VISIBLE_DEVICES has them; None: all.
    """
    if shutil.which("nvidia-smi") is None:
        return ()
    try:
        rows = _query("--query-gpu=index,uuid,memory.total,memory.free", 4)
        apps = _query("--query-compute-apps=gpu_uuid,pid,process_name", 3)
    except (OSError, subprocess.SubprocessError):
        return ()
    return tuple(
        GPU(
            index=int(index),
            total_bytes=int(total) * _MIB,
            free_bytes=int(free) * _MIB,
            processes=tuple((int(pid), name) for gpu, pid, name in apps if gpu == uuid and pid.isdecimal()),
        )
        for index, uuid, total, free in rows
        if _is_visible(index, uuid, visible)
        and total.isdecimal()
        and free.isdecimal()  # a GPU that shares the memory of the CPU has no numbers
    )


def _is_visible(index: str, uuid: str, visible: str | None) -> bool:
    names = [] if visible is None else [name.strip() for name in visible.split(",")]
    return visible is None or index in names or any(name and uuid.startswith(name) for name in names)


def _query(what: str, num_cells: int) -> list[list[str]]:
    """Return the rows with so many cells; the last cell may have commas."""
    command = ["nvidia-smi", what, "--format=csv,noheader,nounits"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_NVIDIA_SMI_S, check=True)
    rows = [[cell.strip() for cell in line.split(",", num_cells - 1)] for line in done.stdout.splitlines()]
    return [row for row in rows if len(row) == num_cells]  # others are messages
