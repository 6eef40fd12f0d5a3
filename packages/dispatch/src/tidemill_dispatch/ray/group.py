"""A group of workers, called as one."""

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal, Self

import ray

from tidemill_dispatch.errors import CallTimeoutError, UnknownMethodError
from tidemill_dispatch.mesh import MeshEntry, MeshLayout
from tidemill_dispatch.method import MethodSpec, registered_methods
from tidemill_dispatch.ray.future import CallFuture, PendingCall
from tidemill_dispatch.ray.packing import pack_calls
from tidemill_dispatch.ray.pool import RayResourcePool
from tidemill_dispatch.ray.processes import WorkerProcesses, end_processes, find_processes, start_processes
from tidemill_dispatch.ray.roles import ONLY_ROLE, ColocatedClasses, RayClassWithInitArgs, public_methods, roles_of
from tidemill_dispatch.sharding import RankCall
from tidemill_dispatch.worker import Worker

_Methods = Mapping[str, tuple[MethodSpec, inspect.Signature]]


@dataclass(frozen=True, slots=True)
class GroupMethod:
    """A registered method of a group; call it."""

    group: "RayWorkerGroup"
    spec: MethodSpec
    signature: inspect.Signature

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Dispatches the call; returns the collected result, or a `CallFuture` if registered with `blocking=False`.

        Raises:
            TypeError: the method does not take these arguments, or one cannot be pickled.
            What the mode raises of the arguments, and, if it waits, what `CallFuture.get` raises.
        """
        try:
            self.signature.bind(None, *args, **kwargs)  # a wrong keyword fails here, not on every rank
        except TypeError as error:
            name = f"{self.spec.name}{self.signature}"
            raise TypeError(f"{name} of group {self.group.name!r} cannot be called so: {error}") from None
        future = self.group.call(self.spec, args, kwargs)
        return future.get() if self.spec.blocking else future


class RayWorkerGroup:
    """Starts one actor per process of `resource_pool` and offers the worker's registered methods as its own.

    Args:
        resource_pool: how many processes, where, with what resources.
        ray_cls_with_init: the worker class and its constructor's arguments, or several by role, as
            `create_colocated_worker_cls` makes them: then `spawn` gives a group for each role.
        name_prefix: the group's name in errors, and the name by which it is found.
        env_vars: environment of the workers, set before the worker's class (and torch) is imported.
        timeout_s: deadline of each call in seconds, the start included, unless `@register` says otherwise.
        blocking: wait until every worker is constructed. With False the constructors run while the caller starts
            other groups; `wait_ready`, or the first call, waits and raises what they raised.
        lifetime: None; "named": others find the group by `from_detached` while this driver runs; "detached": also
            after it, until somebody calls `shutdown`.

    Every method runs in the main thread of its process, one at a time, in the order in which the driver called.

    Raises:
        WorkerError: a worker's constructor raised (method "__init__"); nothing of the group is left.
        RuntimeError: the resources were not free, see `RayResourcePool`.
        ValueError: a registered method has the name of an attribute of this class; a group of this name exists; or
            `env_vars` holds a variable that the group sets itself or that is read only when a process starts.
    """

    def __init__(
        self,
        resource_pool: RayResourcePool,
        ray_cls_with_init: RayClassWithInitArgs | ColocatedClasses,
        *,
        name_prefix: str,
        env_vars: Mapping[str, str] | None = None,
        timeout_s: float = 1800.0,
        blocking: bool = True,
        lifetime: Literal["named", "detached"] | None = None,
    ):
        if lifetime not in (None, "named", "detached"):
            raise ValueError(f"lifetime must be None, 'named' or 'detached', got {lifetime!r}")
        roles = roles_of(ray_cls_with_init)
        methods = {role: _bind_methods(init.cls, type(self)) for role, init in roles.items()}
        processes = start_processes(
            resource_pool,
            roles,
            name=name_prefix,
            env_vars={} if env_vars is None else env_vars,
            timeout_s=timeout_s,
            lifetime=lifetime,
        )
        self._set(processes, {role: init.cls for role, init in roles.items()}, methods, ONLY_ROLE)
        if blocking:
            try:
                self.wait_ready()
            except BaseException:
                self.shutdown()
                raise

    def _set(
        self,
        processes: WorkerProcesses,
        classes: Mapping[str, type[Worker]],
        methods: Mapping[str, _Methods],
        role: str,
    ) -> None:
        self.name = processes.record.name if role == ONLY_ROLE else f"{processes.record.name}/{role}"
        self.world_size = processes.record.world_size
        self.workers = processes.workers
        self._processes = processes
        self._classes = classes
        self._all_methods = methods
        self._role = role
        self._methods: _Methods = methods.get(role, {})
        self._tables: list[dict[str, MeshEntry]] = []
        self._layouts: dict[str, MeshLayout] = {}

    @classmethod
    def from_detached(cls, name_prefix: str, *, timeout_s: float = 60.0) -> Self:
        """Finds a group that was started with `lifetime="named"` or `"detached"`, from any process of the cluster.

        Its methods are called and it is shut down as by its maker; only one of those who hold it may call at a time,
        or the ranks get the calls in different orders. Leaving it alone lets it live.

        Args:
            timeout_s: how long to wait for its ranks; each answers after the call that it is in.

        Raises:
            ValueError: there is no such group in this driver's Ray namespace; the text lists those that there are.
            TimeoutError: ranks were still in a call at the deadline; the text names them.
            RuntimeError: it has lost ranks, or is still being started.
        """
        processes, classes = find_processes(name_prefix, timeout_s)
        group = cls.__new__(cls)
        group._set(processes, classes, {role: _bind_methods(c, cls) for role, c in classes.items()}, ONLY_ROLE)
        group.wait_ready()
        return group

    @classmethod
    def shutdown_detached(cls, name_prefix: str) -> None:
        """Ends a group that `from_detached` would find, also one whose ranks hang or that has lost ranks.

        It asks no rank, kills what lives and gives the resources of a detached group back; those of a named one are its
        maker's. Unlike `shutdown` it does not wait until the processes are gone.

        Raises:
            ValueError: there is no such group in this driver's Ray namespace; the text lists those that there are.
        """
        end_processes(name_prefix)

    def spawn(self, prefix_set: Iterable[str] | None = None) -> dict[str, Self]:
        """A group for each role of colocated workers, or for those in `prefix_set`; they share the processes.

        Shutting one down ends the processes of all.

        Raises:
            ValueError: a role that the group does not have, or the group has no roles.
        """
        known = [role for role in self._classes if role != ONLY_ROLE]
        roles = known if prefix_set is None else list(prefix_set)
        if not known:
            raise ValueError(f"group {self.name!r} has one worker class; create_colocated_worker_cls makes roles")
        if unknown := [role for role in roles if role not in known]:
            raise ValueError(f"group {self.name!r} has no roles {unknown}; its roles are {known}")
        groups = {}
        for role in roles:
            groups[role] = type(self).__new__(type(self))
            groups[role]._set(self._processes, self._classes, self._all_methods, role)
        return groups

    def wait_ready(self, timeout_s: float | None = None) -> None:
        """Waits until every worker's constructor has returned; raises as `CallFuture.get` does."""
        self._processes.wait_ready(timeout_s)

    def check_alive(self, timeout_s: float = 1.0) -> None:
        """Looks whether every worker is alive, for at most `timeout_s`; one that is busy for longer counts as alive.

        A call notices a death by itself; this is for a group that is not called for a while. A worker that is being
        constructed is busy.

        Raises:
            WorkerDiedError: one is not; the text names it.
            WorkerError: a constructor raised.
        """
        self._processes.check_usable()
        pings = {rank: worker.tidemill_ping.remote() for rank, worker in enumerate(self.workers)}
        answers = CallFuture(
            PendingCall(
                processes=self._processes,
                group=self.name,
                method="check_alive",
                receipts=pings,
                values={},
                collect=lambda _: None,
                is_batch_parts=False,
                timeout_s=timeout_s,
            )
        )
        with suppress(CallTimeoutError):  # a busy worker answers later
            self.wait_ready(timeout_s)
            answers.get()  # within what is left of timeout_s

    def mesh(self, name: str) -> MeshLayout:
        """The checked layout of a mesh that the workers registered.

        The workers are asked for all their meshes at the first call over one, and again for one that was not there.

        Raises:
            ValueError: no rank registered it (the text lists the known ones), or it does not hold together.
        """
        if name not in self._layouts:
            if not self._tables or not all(name in table for table in self._tables):
                self._tables = self._ask_meshes()
            known = sorted({mesh for table in self._tables for mesh in table})
            if name not in known:
                raise ValueError(f"group {self.name!r} has no mesh {name!r}; its workers registered {known}")
            self._layouts[name] = MeshLayout.from_entries(name, [table.get(name) for table in self._tables])
        return self._layouts[name]

    def _ask_meshes(self) -> list[dict[str, MeshEntry]]:
        ranks = range(self.world_size)
        return self._submit(
            "registered_meshes",
            dict.fromkeys(ranks, ((), {})),
            collect_ranks=ranks,
            collect=list,
            is_batch_parts=False,
            timeout_s=self._processes.record.timeout_s,
        ).get()

    def dp_size(self, mesh: str) -> int:
        """Number of shards into which calls over `mesh` split a batch."""
        return self.mesh(mesh).dp_size

    def call(self, spec: MethodSpec, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CallFuture:
        """Dispatches one call of a registered method and returns its future, whatever `spec.blocking` says."""
        calls = spec.mode.dispatch_fn(self, args, kwargs)
        collect_ranks = list(calls) if spec.mode.collect_ranks_fn is None else spec.mode.collect_ranks_fn(self)
        self._check_ranks(spec.mode.name, calls, collect_ranks)
        return self._submit(
            spec.name,
            calls,
            collect_ranks=collect_ranks,
            collect=lambda results: spec.mode.collect_fn(self, results),
            is_batch_parts=spec.mode.is_batch_parts,
            timeout_s=self._processes.record.timeout_s if spec.timeout_s is None else spec.timeout_s,
        )

    def _check_ranks(self, mode: str, calls: Mapping[int, RankCall], collect_ranks: Sequence[int]) -> None:
        unknown = [rank for rank in calls if rank not in range(self.world_size)]
        if unknown or not calls:
            raise ValueError(
                f"dispatch_fn of mode {mode!r} must return the calls of one or more ranks from 0 to "
                f"{self.world_size - 1} of group {self.name!r}, got calls of ranks {list(calls)}"
            )
        if idle := [rank for rank in collect_ranks if rank not in calls]:
            raise ValueError(
                f"collect_ranks_fn of mode {mode!r} must name ranks that dispatch_fn calls, which are {list(calls)}, "
                f"got {idle} too"
            )

    def _submit(
        self,
        method: str,
        calls: Mapping[int, RankCall],
        *,
        collect_ranks: Sequence[int],
        collect: Callable[[list[Any]], Any],
        is_batch_parts: bool,
        timeout_s: float,
    ) -> CallFuture:
        self._processes.check_usable()
        self.wait_ready()
        name = f"{self._classes[self._role].__name__}.{method}"
        flat_calls, links = pack_calls(name, calls, self._processes.node)
        receipts: dict[int, ray.ObjectRef] = {}
        values: dict[int, ray.ObjectRef] = {}
        with self._processes.lock:
            for rank, (args, kwargs) in calls.items():
                sent = ((self._role, method, len(args), tuple(kwargs)), *flat_calls[rank], *links.receipts)
                if rank in collect_ranks:
                    receipts[rank], values[rank] = self.workers[rank].tidemill_call.remote(*sent)
                else:
                    receipts[rank] = self.workers[rank].tidemill_call_unsent.remote(*sent)
        return CallFuture(
            PendingCall(
                processes=self._processes,
                group=self.name,
                method=method,
                receipts=receipts,
                values={rank: values[rank] for rank in collect_ranks},
                collect=collect,
                is_batch_parts=is_batch_parts,
                timeout_s=timeout_s,
            ),
            links.futures,
        )

    def shutdown(self) -> None:
        """Kills the workers and what they started, gives the resources back, and waits until the processes are gone.

        It does not wait for calls that are under way. It may be called again, and after `ray.shutdown()`, which
        has ended all but detached groups.
        """
        self._processes.shutdown()

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
        if self._role not in self._classes:
            raise UnknownMethodError(
                f"group {self.name!r} has roles {list(self._classes)}: call {name!r} on one of the groups that "
                "spawn() returns"
            )
        cls = self._classes[self._role]
        advice = "it exists but lacks @register, add it" if name in public_methods(cls) else "no such method"
        raise UnknownMethodError(
            f"{cls.__name__}.{name} cannot be called on group {self.name!r}: {advice}; "
            f"registered methods: {sorted(self._methods)}"
        )


def _bind_methods(cls: type[Worker], group_cls: type) -> _Methods:
    methods = {name: (spec, inspect.signature(getattr(cls, name))) for name, spec in registered_methods(cls).items()}
    taken = sorted(set(methods) & (set(dir(group_cls)) | {"name", "world_size", "workers"}))
    if taken:
        raise ValueError(f"{cls.__name__} registers {taken}, which a worker group has itself; rename the methods")
    return methods
