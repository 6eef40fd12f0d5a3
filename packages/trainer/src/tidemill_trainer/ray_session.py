"""Ray and the training workers of a run."""

import getpass
import logging
import os
import signal
import socket
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import ray
from ray import cloudpickle
from ray._private.state import available_resources_per_node
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from tidemill_dispatch.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup

from tidemill_trainer.config_file import ConfigError
from tidemill_trainer.rollout import engine_files
from tidemill_trainer.rollout.engine_files import EngineFiles
from tidemill_trainer.run_config import WorkersConfig
from tidemill_trainer.stalls.process import registered

_CONNECT_S = 10.0
_REMOVE_S = 30.0
_PINNED_BY_THREADS = "pinned_use_cuda_host_register:True,pinned_num_register_threads:8"
"""How torch pins memory of the host, 4 times as fast as by its default, which writes the pages with one thread."""


def start_ray(address: str | None, num_processes: int) -> bool:
    """Start a Ray cluster on this machine, or connect to the one at `address`, unless this process has one.

    Args:
        address: address of a running cluster; None starts one.
        num_processes: number of the run's processes.

    Returns:
        Whether the caller must shut it down.

    Raises:
        ConfigError: no cluster answers at the address, or Ray's temporary folder is not writable.
    """
    if ray.is_initialized():
        return False
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    os.environ.setdefault("RAY_worker_niceness", "0")  # Ray's default is 15
    if address is None:  # this machine's GCS does not come back after its death, for which Ray would wait 60 s
        os.environ.setdefault("RAY_gcs_rpc_server_reconnect_timeout_s", "10")
    else:
        _check_reachable(address)
    on_sigterm = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(
            address="local" if address is None else address,
            # For Ray this is only the number of processes to start, which may exceed the number of cores.
            num_cpus=num_processes if address is None else None,
            include_dashboard=False if address is None else None,
            log_to_driver=False,
            logging_level=logging.ERROR,
        )
    except BaseException as error:
        with signals_ignored():
            ray.shutdown()
        if address is None and isinstance(error, PermissionError):
            raise ConfigError(
                f"cannot start Ray, because it cannot write {error.filename}: {error.strerror}; if the folder belongs "
                "to another user, set the environment variable RAY_TMPDIR to a folder of yours with a short path"
            ) from error
        raise
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, on_sigterm)  # ray.init has replaced it
    return True


def worker_environment(folder: Path, *, address: str | None) -> dict[str, str]:
    """Return the environment variables of workers, with which they leave no files behind outside of `folder`.

    Libraries that SGLang and Megatron import leave files behind when their process is killed: joblib semaphores in
    /dev/shm; wandb and cuda.tile empty temporary folders. The compile cache remains where other runs find it.

    Args:
        folder: temporary folder of the run.
        address: address of the Ray cluster. None: the run has one machine, and gloo and NCCL listen on its loopback
            interface alone.
    """
    inductor = os.environ.get("TORCHINDUCTOR_CACHE_DIR", f"{tempfile.gettempdir()}/torchinductor_{getpass.getuser()}")
    variables = {"JOBLIB_MULTIPROCESSING": "0", "TMPDIR": str(folder), "TORCHINDUCTOR_CACHE_DIR": inductor}
    interfaces = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"} if address is None else {}
    return variables | {name: os.environ.get(name, value) for name, value in interfaces.items()}


def start_training(
    name: str,
    worker: RayClassWithInitArgs,
    config: WorkersConfig,
    *,
    num_workers: int,
    num_nodes: int,
    num_gpus: float,
    env_vars: Mapping[str, str],
    defaults: Mapping[str, str],
) -> RayWorkerGroup:
    """Start a group of training workers.

    Args:
        name: name of the group.
        worker: class and arguments of the workers.
        config: threads and timeout.
        num_workers: number of processes.
        num_nodes: number of nodes with the same number of these processes each; it divides `num_workers`.
        num_gpus: GPUs that Ray reserves for each process.
        env_vars: environment variables of the workers.
        defaults: further ones, unless the environment of this process has them.
    """
    defaults = {"PYTORCH_ALLOC_CONF": _PINNED_BY_THREADS, **defaults}
    return RayWorkerGroup(
        RayResourcePool([num_workers // num_nodes] * num_nodes, distinct_nodes=True, num_gpus_per_worker=num_gpus),
        worker,
        name_prefix=name,
        env_vars={
            **env_vars,
            "OMP_NUM_THREADS": str(config.omp_num_threads),
            **{name: os.environ.get(name, value) for name, value in defaults.items()},
        },
        timeout_s=config.timeout_s,
        blocking=False,
    )


def check_trainers(error: BaseException | None, groups: Sequence[RayWorkerGroup]) -> None:
    """Check after an error whether a training worker has died, of which the error may be a consequence.

    Raises:
        WorkerDiedError: one has died.
    """
    if isinstance(error, Exception) and ray.is_initialized():
        for group in groups:
            group.check_alive()


def node_resources(*, are_free: bool = False) -> dict[str, dict[str, float]]:
    """Return the CPUs and GPUs of each node of the cluster, by its host name and address.

    Args:
        are_free: only those that no process has reserved.
    """
    free = available_resources_per_node() if are_free else {}
    return {
        f"{node['NodeManagerHostname']} ({node['NodeManagerAddress']})": {
            kind: (free.get(node["NodeID"], {}) if are_free else node["Resources"]).get(kind, 0.0)
            for kind in ("CPU", "GPU")
        }
        for node in ray.nodes()
        if node["Alive"]
    }


def read_node_resources(address: str) -> dict[str, dict[str, float]]:
    """Return `node_resources` of the cluster at an address, without staying connected."""
    is_ours = start_ray(address, 0)
    try:
        return node_resources()
    finally:
        if is_ours:
            ray.shutdown()


def remove_on_other_nodes(files: EngineFiles, logs: Path) -> None:
    """Remove the files of a run on the other nodes where processes of it were, after these have been killed."""
    others = {each.node for each in registered(logs)} - {ray.get_runtime_context().get_node_id()}
    if not others:
        return
    nodes = [node["NodeID"] for node in ray.nodes() if node["Alive"] and node["NodeID"] in others]
    task = ray.remote(num_cpus=0, max_retries=0)(engine_files.remove_when_unused)
    strategies = [NodeAffinitySchedulingStrategy(node, soft=False) for node in nodes]
    cloudpickle.register_pickle_by_value(engine_files)  # its package imports torch, which takes seconds there
    try:
        removals = [task.options(scheduling_strategy=strategy).remote(files.folder) for strategy in strategies]
    finally:
        cloudpickle.unregister_pickle_by_value(engine_files)
    if removals:  # the next run on a node removes what is left there
        ray.wait(removals, num_returns=len(removals), timeout=_REMOVE_S)


def _check_reachable(address: str) -> None:
    """Check that a server listens at "host:port", because Ray itself would wait for minutes.

    Raises:
        ConfigError: no server answers.
    """
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdecimal():  # such as "auto"
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_S).close()  # "[::1]:6379"
    except OSError as error:
        raise ConfigError(
            f"config key trainer.ray_address: no Ray cluster answers at {address}: {error}; start it, or remove the key"
        ) from error


@contextmanager
def signals_ignored() -> Iterator[None]:
    """Ignore SIGINT and SIGTERM during cleanup, so that a second Ctrl-C does not leave processes behind."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
