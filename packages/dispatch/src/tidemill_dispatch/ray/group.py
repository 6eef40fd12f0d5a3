"""A group of Ray actors that run one worker class, called as one."""

import inspect
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import ray
from ray.exceptions import RayActorError

from tidemill_dispatch.errors import WorkerDiedError
from tidemill_dispatch.mesh import MeshEntry, MeshLayout
from tidemill_dispatch.ray.arguments import pack, pack_calls
from tidemill_dispatch.ray.future import CallFuture
from tidemill_dispatch.ray.host import HostInfo, WorkerHost, host_class
from tidemill_dispatch.ray.pool import RayResourcePool
from tidemill_dispatch.registry import Execute, MethodSpec, RankCall, registered_methods
from tidemill_dispatch.worker import Worker

_GONE_S = 10.0
_logger = logging.getLogger(__name__)
_RANK_VARIABLES = frozenset({"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"})
_START_VARIABLES = frozenset({"LD_PRELOAD", "LD_LIBRARY_PATH", "PYTHONPATH", "PYTHONHASHSEED", "PYTHONUNBUFFERED"})


class RayClassWithInitArgs:
    """A worker class and the arguments of its constructor, for every rank alike.

    `cls` is the plain class, not the result of `ray.remote(cls)`. The arguments are pickled once per group.
    """

    def __init__(self, cls: type[Worker], *args: Any, **kwargs: Any):
        if not isinstance(cls, type) or not issubclass(cls, Worker):
            raise TypeError(
                f"expected a subclass of tidemill_dispatch.Worker (the plain class, without ray.remote), got {cls!r}"
            )
        inspect.signature(cls).bind(*args, **kwargs)
        self.cls = cls
        self.args = args
        self.kwargs = kwargs


@dataclass(frozen=True, slots=True)
class GroupMethod:
    """A registered method of a group; call it."""

    group: "RayWorkerGroup"
    spec: MethodSpec
    signature: inspect.Signature

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Dispatches the call; returns the collected result, or a `CallFuture` if registered with `blocking=False`."""
        self.signature.bind(None, *args, **kwargs)  # a wrong keyword fails here, not on every rank
        future = self.group.call(self.spec, args, kwargs)
        return future.get() if self.spec.blocking else future


class RayWorkerGroup:
    """Starts one actor per rank of `resource_pool` and offers the worker's registered methods as its own.

    Args:
        resource_pool: how many processes, where, with what resources.
        ray_cls_with_init: the worker class and its constructor's arguments.
        name_prefix: the group's name in errors.
        env_vars: environment of the workers, set before the worker's class (and torch) is imported.
        timeout_s: deadline of each call in seconds, the start included, unless `@register` says otherwise.
        blocking: wait until every worker is constructed. With False the constructors run while the caller starts
            other groups; `wait_ready`, or the first call, waits and raises what they raised.

    Every method runs in the main thread of its process, one at a time, in the order in which the driver called.

    Raises:
        WorkerError: a worker's constructor raised (method "__init__"); nothing of the group is left.
        RuntimeError: the resources were not free, see `RayResourcePool.placement_timeout_s`.
        ValueError: a registered method has the name of an attribute of this class, or `env_vars` holds a variable that
            the group sets itself or that is read only when a process starts.
    """

    def __init__(
        self,
        resource_pool: RayResourcePool,
        ray_cls_with_init: RayClassWithInitArgs,
        *,
        name_prefix: str,
        env_vars: Mapping[str, str] | None = None,
        timeout_s: float = 1800.0,
        blocking: bool = True,
    ):
        cls = ray_cls_with_init.cls
        self.name = name_prefix
        self.world_size = resource_pool.world_size
        self.workers: list[Any] = []
        self._cls = cls
        self._timeout_s = timeout_s
        self._methods = _bind_methods(cls, type(self))
        self._layouts: dict[str, MeshLayout] = {}
        self._infos: list[ray.ObjectRef] = []
        self._hosts: list[HostInfo] = []
        self._death: WorkerDiedError | None = None
        self._closed = False
        self._lock = threading.Lock()
        payload = pack(f"{cls.__name__} or its arguments", (cls, ray_cls_with_init.args, ray_cls_with_init.kwargs))
        env = _checked_env({} if env_vars is None else env_vars)
        self._placement = resource_pool.place(name_prefix)
        try:
            self._start(resource_pool, payload, env)
            if blocking:
                self.wait_ready()
        except BaseException:
            self.shutdown()
            raise

    def _start(self, pool: RayResourcePool, payload: Any, env: dict[str, str]) -> None:
        actor_class = ray.remote(host_class(self._cls, _public_methods(self._cls)))
        for rank in range(self.world_size):
            options = {
                "num_cpus": pool.num_cpus_per_worker,
                "num_gpus": pool.num_gpus_per_worker,
                "scheduling_strategy": self._placement.strategy(rank),
            }
            self.workers.append(actor_class.options(**options).remote())
        # The ranks learn of each other through Ray, without the driver: the constructors start as soon as all are up.
        self._infos = [worker.tidemill_describe.remote() for worker in self.workers]
        pairs = {
            rank: worker.tidemill_construct.remote(payload, env, rank, *self._infos)
            for rank, worker in enumerate(self.workers)
        }
        self._ready = self._future("__init__", pairs, [], lambda _: None, self._timeout_s)

    def wait_ready(self, timeout_s: float | None = None) -> None:
        """Waits until every worker's constructor has returned; raises as `CallFuture.get` does."""
        if not self._hosts:
            self._ready.get(timeout_s)
            self._hosts = ray.get(self._infos)

    def mesh(self, name: str) -> MeshLayout:
        """The checked layout of a mesh that the workers registered; asked of them once.

        Raises:
            ValueError: no rank registered it (the text lists the known ones), or it does not hold together.
        """
        if name not in self._layouts:
            ranks = range(self.world_size)
            query = self._submit("registered_meshes", [((), {})] * self.world_size, ranks, ranks, list, self._timeout_s)
            tables: list[dict[str, MeshEntry]] = query.get()
            known = sorted({mesh for table in tables for mesh in table})
            if name not in known:
                raise ValueError(f"group {self.name!r} has no mesh {name!r}; its workers registered {known}")
            entries = [table.get(name) for table in tables]
            self._layouts[name] = MeshLayout.from_entries(name, entries)
        return self._layouts[name]

    def dp_size(self, mesh: str) -> int:
        """Number of shards into which calls over `mesh` split a batch."""
        return self.mesh(mesh).dp_size

    def call(self, spec: MethodSpec, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CallFuture:
        """Dispatches one call of a registered method and returns its future, whatever `spec.blocking` says."""
        calls = spec.mode.dispatch_fn(self, args, kwargs)
        if len(calls) != self.world_size:
            raise ValueError(
                f"dispatch mode {spec.mode.name!r} made {len(calls)} calls; group {self.name!r} has "
                f"{self.world_size} ranks"
            )
        return self._submit(
            spec.name,
            calls,
            range(1 if spec.execute_mode is Execute.RANK_ZERO else self.world_size),
            spec.mode.result_ranks_fn(self),
            lambda results: spec.mode.collect_fn(self, results),
            self._timeout_s if spec.timeout_s is None else spec.timeout_s,
        )

    def _submit(
        self,
        method: str,
        calls: Sequence[RankCall],
        ranks: Sequence[int],
        result_ranks: Sequence[int],
        collect: Callable[[list[Any]], Any],
        timeout_s: float,
    ) -> CallFuture:
        self._check_usable()
        self.wait_ready()
        flat_calls = pack_calls(f"{self._cls.__name__}.{method}", [calls[rank] for rank in ranks])
        # Under the lock, so that calls of several driver threads reach every rank in the same order.
        with self._lock:
            pairs = {
                rank: self.workers[rank].tidemill_call.remote(
                    (method, rank in result_ranks, len(calls[rank][0]), tuple(calls[rank][1])), *flat
                )
                for rank, flat in zip(ranks, flat_calls, strict=True)
            }
        return self._future(method, pairs, result_ranks, collect, timeout_s)

    def _future(
        self,
        method: str,
        pairs: Mapping[int, tuple[ray.ObjectRef, ray.ObjectRef]],
        result_ranks: Sequence[int],
        collect: Callable[[list[Any]], Any],
        timeout_s: float,
    ) -> CallFuture:
        return CallFuture(
            group=self.name,
            method=method,
            receipts={rank: pair[0] for rank, pair in pairs.items()},
            values={rank: pairs[rank][1] for rank in result_ranks},
            pings={rank: worker.tidemill_ping.remote for rank, worker in enumerate(self.workers) if rank not in pairs},
            collect=collect,
            timeout_s=timeout_s,
            host_of=lambda rank: (
                f"{self._hosts[rank].hostname}:{self._hosts[rank].pid}" if self._hosts else "unknown host"
            ),
            on_death=self._note_death,
        )

    def _note_death(self, error: WorkerDiedError) -> None:
        self._death = error

    def _check_usable(self) -> None:
        if self._closed:
            raise RuntimeError(f"group {self.name!r} was shut down; start a new one")
        if self._death is not None:
            raise self._death

    def shutdown(self) -> None:
        """Kills the workers and what they started, gives the resources back, and waits until the processes are gone.

        It does not wait for calls that are under way. It may be called again, and after `ray.shutdown()`.
        """
        if self._closed:
            return
        self._closed = True
        if not ray.is_initialized():
            return
        groups = self._local_process_groups()
        for worker in self.workers:
            ray.kill(worker, no_restart=True)
        self._placement.remove()
        deadline = time.monotonic() + _GONE_S
        while left := [group for group in groups if _exists(group)]:
            if time.monotonic() > deadline:
                _logger.warning(
                    "processes of group %r are still there %g s after they were killed: %s", self.name, _GONE_S, left
                )
                return
            time.sleep(0.02)

    def _local_process_groups(self) -> list[int]:
        """Process groups of the workers on this machine. Ray starts every worker as the leader of its own."""
        ready, _ = ray.wait(self._infos, num_returns=len(self._infos), timeout=0) if self._infos else ([], [])
        here = ray.get_runtime_context().get_node_id()
        groups = []
        for ref in ready:
            try:
                info: HostInfo = ray.get(ref)
            except RayActorError:  # died before it could tell: gone already
                continue
            if info.node_id == here and info.process_group == info.pid:
                groups.append(info.process_group)
        return groups

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown()

    def __getattr__(self, name: str) -> GroupMethod:
        if name.startswith("_"):
            raise AttributeError(name)
        if name in self._methods:
            spec, signature = self._methods[name]
            return GroupMethod(self, spec, signature)
        advice = "it exists but lacks @register" if name in dict(_public_methods(self._cls)) else "no such method"
        raise AttributeError(
            f"{self._cls.__name__}.{name} cannot be called on group {self.name!r}: {advice}; "
            f"registered methods: {sorted(self._methods)}"
        )


def _exists(process_group: int) -> bool:
    try:
        os.killpg(process_group, 0)
    except ProcessLookupError:
        return False
    return True


def _bind_methods(cls: type[Worker], group_cls: type) -> dict[str, tuple[MethodSpec, inspect.Signature]]:
    methods = {name: (spec, inspect.signature(getattr(cls, name))) for name, spec in registered_methods(cls).items()}
    taken = sorted(set(methods) & (set(dir(group_cls)) | {"name", "world_size", "workers"}))
    if taken:
        raise ValueError(f"{cls.__name__} registers {taken}, which a worker group has itself; rename the methods")
    return methods


def _public_methods(cls: type[Worker]) -> dict[str, Any]:
    """Functions of the user's classes (not of Worker) by name, for calls through a bare actor handle."""
    bases = [base for base in cls.__mro__ if base not in Worker.__mro__]
    found = {name: value for base in reversed(bases) for name, value in vars(base).items()}
    return {
        name: value
        for name, value in found.items()
        if inspect.isfunction(value) and not name.startswith("_") and name not in vars(WorkerHost)
    }


def _checked_env(env_vars: Mapping[str, str]) -> dict[str, str]:
    wrong_type = {key: value for key, value in env_vars.items() if not isinstance(value, str)}
    if wrong_type:
        raise TypeError(f"env_vars must map str to str, got {wrong_type}; write the values as strings")
    if taken := sorted(_RANK_VARIABLES & set(env_vars)):
        raise ValueError(f"env_vars may not hold {taken}: the group sets them for each rank")
    if late := sorted(_START_VARIABLES & set(env_vars)):
        raise ValueError(
            f"env_vars may not hold {late}: they are read when a process starts, before the group can set them; "
            "set them in ray.init(runtime_env={'env_vars': ...}) or in the shell"
        )
    return dict(env_vars)
