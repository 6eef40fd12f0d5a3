"""Checks of one node: pure functions from its facts to findings."""

import ipaddress
from collections.abc import Iterator

from tidemill_trainer.config import Config
from tidemill_trainer.doctor.facts import NodeFacts
from tidemill_trainer.doctor.finding import Finding
from tidemill_trainer.run_config import RunConfig

_GIB = 2**30
_MIN_OPEN_FILES = 4096
_MIN_SHARED_MEMORY = _GIB
_MAX_USED = 0.1
# More workers per CPU are almost certainly a typo and would exhaust memory.
_MAX_WORKERS_PER_CPU = 8


def check_node(facts: NodeFacts) -> list[Finding]:
    """Check what every run requires of a node."""
    checks = (check_open_files, check_shared_memory, check_gpus, check_leftovers)
    return [finding for check in checks for finding in check(facts)]


def check_open_files(facts: NodeFacts) -> Iterator[Finding]:
    """Check the soft limit of open files: Ray, engines and episodes hold a socket for each connection."""
    if facts.open_files < _MIN_OPEN_FILES:
        yield Finding(
            node=facts.name,
            cause=f"a process may open {facts.open_files} files, expected at least {_MIN_OPEN_FILES}",
            remedy="raise the limit with `ulimit -n 65536` before Ray or the run is started",
            is_error=False,
        )


def check_shared_memory(facts: NodeFacts) -> Iterator[Finding]:
    """Check the size of /dev/shm, which Ray's objects and NCCL use."""
    if facts.shared_memory_bytes < _MIN_SHARED_MEMORY:
        yield Finding(
            node=facts.name,
            cause=f"/dev/shm has {facts.shared_memory_bytes / _GIB:.2f} GiB, expected at least "
            f"{_MIN_SHARED_MEMORY / _GIB:.0f} GiB: Ray writes batches to the disk instead, and NCCL fails",
            remedy="enlarge it: --shm-size=16g for a container, an emptyDir volume with medium Memory in Kubernetes",
            is_error=False,
        )


def check_gpus(facts: NodeFacts) -> Iterator[Finding]:
    """Check that the memory of the GPUs is free."""
    for gpu in facts.gpus:
        used = gpu.total_bytes - gpu.free_bytes
        if not gpu.processes and used <= _MAX_USED * gpu.total_bytes:
            continue
        users = ", ".join(f"{pid} ({name})" for pid, name in gpu.processes)
        yield Finding(
            node=facts.name,
            cause=f"GPU {gpu.index} has {gpu.free_bytes / _GIB:.1f} of {gpu.total_bytes / _GIB:.1f} GiB free, used by "
            + (f"process {users}" if users else "processes that are not visible here"),
            remedy="stop what uses it, hide the GPU with CUDA_VISIBLE_DEVICES, or lower rollout.mem_fraction_static",
            is_error=False,
        )


def check_leftovers(facts: NodeFacts) -> Iterator[Finding]:
    """Report what dead runs left."""
    if facts.leftovers:
        yield Finding(
            node=facts.name,
            cause=f"dead runs left {', '.join(facts.leftovers)}",
            remedy="repeat this command with --clean, which removes it",
            is_error=False,
        )


def check_model(facts: NodeFacts) -> Iterator[Finding]:
    """Check that the model can be read."""
    if isinstance(facts.model, str):
        yield Finding(
            node=facts.name,
            cause=f"config key model.path: {facts.model}",
            remedy="copy the model to the same path of each node, or use a shared file system",
        )


def check_address(facts: NodeFacts) -> Iterator[Finding]:
    """Check that other nodes of a cluster reach this one at its addresses."""
    if _is_loopback(facts.address):
        yield Finding(
            node=facts.name,
            cause=f"its address in the cluster is the loopback address {facts.address}, which other nodes cannot reach",
            remedy="start Ray on it with `--node-ip-address` and the address of a network interface",
        )
    elif facts.interface is None:
        yield Finding(
            node=facts.name,
            cause=f"no network interface has its address in the cluster, {facts.address}, so gloo and NCCL select one",
            remedy="start Ray on it with `--node-ip-address` and the address of an interface, or with "
            "GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME",
            is_error=False,
        )


def check_devices(facts: NodeFacts, config: RunConfig, *, has_cuda: bool) -> Iterator[Finding]:
    """Check devices and CPUs of a run on this machine alone.

    Args:
        has_cuda: whether torch finds a CUDA device.
    """
    devices = {"engine.device": config.engine.device}
    if isinstance(config, Config):
        devices["rollout.device"] = config.rollout.device
    for key, device in devices.items():
        if device == "cuda" and not has_cuda:
            yield Finding(
                node=facts.name,
                cause=f'{key}="cuda" requires a GPU, but torch finds no CUDA device',
                remedy='use "auto" or "cpu"',
            )
    if config.engine.device == "cuda" or (config.engine.device == "auto" and has_cuda):
        return
    numbers, cpus = config.training_workers(), facts.num_cpus
    workers, keys, limit = sum(numbers.values()), " + ".join(numbers), _MAX_WORKERS_PER_CPU * cpus
    if workers > limit:
        yield Finding(
            node=facts.name,
            cause=f"{keys} must be <= {limit}, {_MAX_WORKERS_PER_CPU} for each of the {cpus} CPUs that this process "
            f"may use, got {workers}",
            remedy="lower it",
        )
    elif workers > cpus:
        yield Finding(
            node=facts.name,
            cause=f"{keys}={workers} is larger than the {cpus} CPUs that this process may use: the workers will slow "
            "each other down",
            remedy="lower it, or ignore this for a test",
            is_error=False,
        )


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address).is_loopback
