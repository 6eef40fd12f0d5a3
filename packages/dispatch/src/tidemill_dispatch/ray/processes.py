"""The processes of a group: start, lookup by name, and shutdown."""

import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayError

from tidemill_dispatch.ray.actor import actor_class
from tidemill_dispatch.ray.call import Call, Generation
from tidemill_dispatch.ray.future import CallFuture
from tidemill_dispatch.ray.pickling import pack, unpacked
from tidemill_dispatch.ray.pool import RayResourcePool
from tidemill_dispatch.ray.rendezvous import HostInfo
from tidemill_dispatch.ray.reservation import Placement, detached_placement_groups, remove_placement_groups
from tidemill_dispatch.ray.roles import RayClassWithInitArgs
from tidemill_dispatch.worker import Worker

_EXIT_TIMEOUT_S = 60.0  # freeing 98 GB of pinned memory took longer than 10
_logger = logging.getLogger(__name__)
_RANK_VARIABLES = frozenset({"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"})
_STARTUP_VARIABLES = frozenset({"LD_PRELOAD", "LD_LIBRARY_PATH", "PYTHONPATH", "PYTHONHASHSEED", "PYTHONUNBUFFERED"})


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupRecord:
    """Description of a group that its workers keep, for drivers that find it by name."""

    name: str
    world_size: int
    timeout_s: float
    placement: Placement
    detached: bool


class WorkerProcesses:
    """One actor per rank, shared by the groups of all their roles. See `start_processes` and `find_processes`.

    Args:
        record: description of the group.
        workers: actor handles by rank.
        release_resources: called at shutdown.
        start: starts the process of a rank; None in a driver that has not started the group.

    Attributes:
        infos: references to the `HostInfo` of each rank.
        generation: where the ranks run, and whether one has died; a restart replaces it.
        lock: held while a call is sent, so that calls of several threads reach every rank in the same order.
    """

    def __init__(
        self,
        record: GroupRecord,
        workers: list[Any],
        release_resources: Callable[[], None],
        start: Callable[[int], Any] | None = None,
    ):
        self.record = record
        self.workers = workers
        self.generation = Generation()
        self.lock = threading.Lock()
        self._release_resources = release_resources
        self._start = start
        self._construction: tuple[Any, dict[str, str]] | None = None
        self.infos: list[ray.ObjectRef] = []
        self._constructing: dict[int, ray.ObjectRef] = {}  # receipts of the constructors that nobody has waited for
        self._ready: CallFuture | None = None
        self._closed = False
        self._connection = _connection()

    def construct(self, payload: Any, env: dict[str, str]) -> None:
        """Start the construction of the workers on all ranks; `wait_ready` waits for it."""
        self._construction = payload, env
        # Each rank receives the addresses of all as arguments, without the driver: constructors start when all are up.
        self.infos = [worker.tidemill_describe.remote() for worker in self.workers]
        self._ready = self._construct(range(len(self.workers)))

    def restart(self, ranks: Sequence[int]) -> None:
        """Replace the processes of ranks and start the construction of their workers; `wait_ready` waits for it.

        Raises:
            RuntimeError: another driver started the group, or it was shut down.
        """
        self._check_open()
        if self._start is None:
            raise RuntimeError(
                f"ranks of group {self.record.name!r} can only be restarted by the driver that started the group"
            )
        exiting = self._local_process_groups(ranks)
        for rank in ranks:
            ray.kill(self.workers[rank], no_restart=True)
        self._wait_for_exit(exiting)
        for rank in ranks:
            self.workers[rank] = self._start(rank)
            self.infos[rank] = self.workers[rank].tidemill_describe.remote()
        self.generation = Generation()
        self._ready = self._construct(ranks)

    def _construct(self, ranks: Iterable[int]) -> CallFuture:
        assert self._construction is not None
        payload, env = self._construction
        for rank in ranks:
            worker = self.workers[rank]
            receipt, _ = worker.tidemill_construct.remote(payload, env, rank, self.record, *self.infos)
            self._constructing[rank] = receipt
        return CallFuture(
            Call(
                processes=self,
                generation=self.generation,
                group=self.record.name,
                method="__init__",
                receipts=dict(self._constructing),
                values={},
                collect=lambda _: None,
                is_batch_parts=False,
                timeout_s=self.record.timeout_s,
            )
        )

    def wait_ready(self, timeout_s: float | None = None) -> Generation:
        """Wait until the constructor of every worker has returned, and return the generation of the processes.

        Raises as `CallFuture.get`.
        """
        generation = self.generation
        if not generation.hosts:
            if self._ready is not None:
                self._ready.get(timeout_s)
            self._constructing = {}
            # Does not wait: the constructors needed them, or `find_processes` waited.
            generation.hosts = ray.get(self.infos)
        return generation

    def check_usable(self) -> None:
        """Raise RuntimeError after `shutdown`, and WorkerDiedError after the death of a worker."""
        self._check_open()
        if self.generation.death is not None:
            raise self.generation.death

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError(f"group {self.record.name!r} was shut down; start a new one")

    def shutdown(self) -> None:
        """Kill the workers and their child processes, release the resources, and wait for the processes to exit."""
        if self._closed:
            return
        connected = ray.is_initialized() and _connection() == self._connection
        exiting = self._local_process_groups(range(len(self.infos))) if connected else []
        self._closed = True
        _kill(self.workers if connected else [], self._release_resources)
        self._wait_for_exit(exiting)

    def _wait_for_exit(self, process_groups: Sequence[int]) -> None:
        deadline = time.monotonic() + _EXIT_TIMEOUT_S
        while left := [group for group in process_groups if _exists(group)]:
            if time.monotonic() > deadline:
                _logger.warning(
                    "processes of group %r have not exited %g s after they were killed; their process groups: %s",
                    self.record.name,
                    _EXIT_TIMEOUT_S,
                    left,
                )
                return
            time.sleep(0.02)

    def _local_process_groups(self, ranks: Iterable[int]) -> list[int]:
        """Return the process groups of ranks on this node. Ray makes each worker the leader of its own."""
        infos = [self.infos[rank] for rank in ranks]
        ready, _ = ray.wait(infos, num_returns=len(infos), timeout=0) if infos else ([], [])
        here = ray.get_runtime_context().get_node_id()
        groups = []
        for ref in ready:
            try:
                info: HostInfo = ray.get(ref)
            except RayError:  # the worker died or did not answer, so its process group is unknown
                continue
            if info.node_id == here and info.process_group == info.pid:
                groups.append(info.process_group)
        return groups


def start_processes(
    pool: RayResourcePool,
    roles: Mapping[str, RayClassWithInitArgs],
    *,
    name: str,
    env_vars: Mapping[str, str],
    timeout_s: float,
    lifetime: str | None,
) -> WorkerProcesses:
    """Start one actor for each process of the pool.

    Args:
        lifetime: None; "named": the actors have names and exit with the driver; "detached": the actors have names and
            outlive the driver.

    Raises:
        RuntimeError: the resources were not free before the placement timeout.
        ValueError: `env_vars` holds a reserved variable, or a named group of this name exists.
        TypeError: a class or its arguments cannot be pickled, or `env_vars` are not strings.
    """
    names = ", ".join(init.cls.__name__ for init in roles.values())
    payload = pack(f"{names} or their arguments", {k: (v.cls, v.args, v.kwargs) for k, v in roles.items()})
    env = _checked_env(env_vars)
    if lifetime is not None and (name in _named_ranks() or detached_placement_groups(name)):
        raise ValueError(
            f"a group named {name!r} exists; connect to it with from_detached, stop it with shutdown_detached, or "
            "choose another name"
        )
    placement = pool.place(name, detached=lifetime == "detached")
    record = GroupRecord(
        name=name,
        world_size=pool.world_size,
        timeout_s=timeout_s,
        placement=placement,
        detached=lifetime == "detached",
    )
    remote_class = ray.remote(actor_class(roles))

    def start(rank: int) -> Any:
        options = placement.actor_options(rank)
        if lifetime is not None:
            options["name"] = actor_name(name, rank)
        if lifetime == "detached":
            options["lifetime"] = "detached"
        return remote_class.options(**options).remote()

    processes = WorkerProcesses(record, [], lambda: pool.release(name), start)
    try:
        processes.workers += [start(rank) for rank in range(pool.world_size)]
        processes.construct(payload, env)
    except BaseException:
        processes.shutdown()
        raise
    return processes


def find_processes(name: str, timeout_s: float) -> tuple[WorkerProcesses, dict[str, type[Worker]]]:
    """Return the processes of a named or detached group, and its worker classes by role.

    Raises:
        ValueError: no such group in this driver's Ray namespace; the message lists the existing groups.
        TimeoutError: ranks did not answer; the message names them.
        RuntimeError: ranks have died, or the group is still starting.
    """
    deadline = time.monotonic() + timeout_s
    ranks = _named_ranks()
    if name not in ranks:
        raise _no_group(name, ranks)
    if 0 not in ranks[name]:
        raise _incomplete(name, ranks[name])
    workers = [ray.get_actor(actor_name(name, rank)) for rank in ranks[name]]
    identity = workers[0].tidemill_identity.remote()  # answered before tidemill_describe of rank 0
    infos: list[Any] = [worker.tidemill_describe.remote() for worker in workers]
    ready, _ = ray.wait(infos, num_returns=len(infos), timeout=timeout_s)
    if busy := [rank for rank, info in zip(ranks[name], infos, strict=True) if info not in ready]:
        raise TimeoutError(
            f"ranks {busy} of group {name!r} did not answer within {timeout_s:g} s, because they run a call; raise "
            f"timeout_s, or stop the group with RayWorkerGroup.shutdown_detached({name!r})"
        )
    record, classes = ray.get(identity)
    if record is None or len(workers) < record.world_size:
        raise _incomplete(name, ranks[name])
    if isinstance(classes, ray.ObjectRef):
        classes = ray.get(classes, timeout=max(0.0, deadline - time.monotonic()))
    processes = WorkerProcesses(record, workers, record.placement.remove if record.detached else lambda: None)
    processes.infos = infos
    return processes, unpacked(classes)


def stop_processes(name: str) -> None:
    """Kill the ranks of a named or detached group by name, and release the resources of a detached one.

    Raises:
        ValueError: no such group in this driver's Ray namespace; the message lists the existing groups.
    """
    ranks = _named_ranks()
    placement_groups = detached_placement_groups(name)
    if name not in ranks and not placement_groups:
        raise _no_group(name, ranks)
    workers = [ray.get_actor(actor_name(name, rank)) for rank in ranks.get(name, [])]
    # The last one first: after an error the remaining ones are still found by their numbers.
    _kill(workers, lambda: remove_placement_groups(reversed(placement_groups)))


def actor_name(group: str, rank: int) -> str:
    return f"{group}:{rank}"


def _named_ranks() -> dict[str, list[int]]:
    """Return the living ranks of the named and detached groups in this driver's Ray namespace, in rank order."""
    found: dict[str, list[int]] = {}
    for group, _, rank in (actor.rpartition(":") for actor in ray.util.list_named_actors()):
        if rank.isdecimal():
            found.setdefault(group, []).append(int(rank))
    return {group: sorted(ranks) for group, ranks in found.items()}


def _no_group(name: str, ranks: Mapping[str, list[int]]) -> ValueError:
    namespace = ray.get_runtime_context().namespace
    return ValueError(
        f"no group {name!r} in Ray namespace {namespace!r}, which has the groups {sorted(ranks)}; start the group with "
        "lifetime='named' or 'detached', in a driver with the same ray.init(namespace=...)"
    )


def _incomplete(name: str, ranks: list[int]) -> RuntimeError:
    return RuntimeError(
        f"group {name!r} is not complete: only ranks {ranks} are alive. The group is still starting, or other ranks "
        f"have died; retry, or stop it with RayWorkerGroup.shutdown_detached({name!r})"
    )


def _kill(workers: Iterable[Any], release_resources: Callable[[], None]) -> None:
    """Kill the workers, then release the resources. An error in one step is raised after all others have run."""
    with ExitStack() as stack:
        stack.callback(release_resources)
        for worker in workers:
            stack.callback(ray.kill, worker, no_restart=True)


def _connection() -> tuple[str, str]:
    """Return the identity of this process in Ray; another one after `ray.shutdown()` and `ray.init()`."""
    context = ray.get_runtime_context()
    return context.get_node_id(), context.get_worker_id()  # drivers of two clusters may have one worker id


def _exists(process_group: int) -> bool:
    try:
        os.killpg(process_group, 0)
    except ProcessLookupError:
        return False
    return True


def _checked_env(env_vars: Mapping[str, str]) -> dict[str, str]:
    wrong_types = {key: value for key, value in env_vars.items() if not isinstance(value, str)}
    if wrong_types:
        raise TypeError(f"env_vars must map str to str, got {wrong_types}; write the values as strings")
    if taken := sorted(_RANK_VARIABLES & set(env_vars)):
        raise ValueError(f"env_vars must not contain {taken}, which the group sets for each rank; remove them")
    if late := sorted(_STARTUP_VARIABLES & set(env_vars)):
        raise ValueError(
            f"env_vars must not contain {late}, which are read when a process starts, before the group can set them; "
            "set them in ray.init(runtime_env={'env_vars': ...}) or in the shell"
        )
    return dict(env_vars)
