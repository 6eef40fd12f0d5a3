"""A group of workers that is called as one object."""

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
from tidemill_dispatch.ray.call import Call
from tidemill_dispatch.ray.future import CallFuture
from tidemill_dispatch.ray.liveness import dead_workers
from tidemill_dispatch.ray.packing import pack_calls
from tidemill_dispatch.ray.pool import RayResourcePool
from tidemill_dispatch.ray.processes import WorkerProcesses, find_processes, start_processes, stop_processes
from tidemill_dispatch.ray.rendezvous import HostInfo
from tidemill_dispatch.ray.roles import ONLY_ROLE, ColocatedClasses, RayClassWithInitArgs, public_methods, roles_of
from tidemill_dispatch.sharding import RankCall
from tidemill_dispatch.worker import Worker

_Methods = Mapping[str, tuple[MethodSpec, inspect.Signature]]


@dataclass(frozen=True, slots=True)
class GroupMethod:
    """A registered method of a group, to be called."""

    group: "RayWorkerGroup"
    spec: MethodSpec
    signature: inspect.Signature

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Dispatch the call. Return the collected result, or a `CallFuture` if registered with `blocking=False`.

        Raises:
            TypeError: the method does not take these arguments, or one of them cannot be pickled.
            As the dispatch mode, and, with `blocking=True`, as `CallFuture.get`.
        """
        try:
            self.signature.bind(None, *args, **kwargs)  # a wrong keyword fails here, not on every rank
        except TypeError as error:
            name = f"{self.spec.name}{self.signature}"
            raise TypeError(
                f"{name} of group {self.group.name!r} cannot be called with these arguments: {error}"
            ) from None
        future = self.group.call(self.spec, args, kwargs)
        return future.get() if self.spec.blocking else future


class RayWorkerGroup:
    """One actor per process of `resource_pool`; the registered methods of the worker are methods of the group.

    Args:
        resource_pool: number of processes, their nodes and resources.
        ray_cls_with_init: worker class with the arguments of its constructor, or several by role
            (`create_colocated_worker_cls`); `spawn` then returns a group for each role.
        name_prefix: name of the group in errors, and in `from_detached`.
        env_vars: environment variables of the workers, set before the worker's class (and torch) is imported.
        timeout_s: timeout in seconds of the start and of each call whose `@register` has none.
        blocking: whether to wait until every worker is constructed. With False, the constructors run while the caller
            starts other groups; `wait_ready`, or the first call, waits for them and raises their errors.
        lifetime: None; "named": `from_detached` finds the group while this driver runs; "detached": the group outlives
            the driver until `shutdown` or `shutdown_detached`.

    Each method runs in the main thread of its process, one at a time, in the order of the driver's calls.

    Raises:
        WorkerError: a worker's constructor raised (method "__init__"). The group is shut down.
        CallTimeoutError: constructors did not return within `timeout_s`. The group is shut down.
        RuntimeError: the resources were not free, see `RayResourcePool`.
        TypeError: the pool, the class or `timeout_s` has another type.
        ValueError: a registered method has the name of an attribute of this class, a named group of this name exists,
            or `env_vars` holds a variable that the group sets or that is read only when a process starts.
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
        if not isinstance(resource_pool, RayResourcePool):
            raise TypeError(f"resource_pool must be a RayResourcePool([...]), got {resource_pool!r}")
        if not isinstance(timeout_s, int | float):
            raise TypeError(f"timeout_s must be a number of seconds (math.inf for no timeout), got {timeout_s!r}")
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
        """Connect to a group that was started with `lifetime="named"` or `"detached"`, from any process of the cluster.

        The returned group supports the same calls, and `shutdown`, as that of the driver that started it. Only one
        process may call the group at a time: otherwise ranks may receive the calls in different orders. The group keeps
        running when the returned object is discarded.

        Args:
            timeout_s: timeout of the wait for its ranks, in seconds; a rank answers after its current call.

        Raises:
            ValueError: no such group in this driver's Ray namespace; the message lists the existing groups.
            TimeoutError: ranks were still running a call at the timeout; the message names them.
            RuntimeError: ranks have died, or the group is still starting.
        """
        processes, classes = find_processes(name_prefix, timeout_s)
        group = cls.__new__(cls)
        group._set(processes, classes, {role: _bind_methods(c, cls) for role, c in classes.items()}, ONLY_ROLE)
        group.wait_ready()
        return group

    @classmethod
    def shutdown_detached(cls, name_prefix: str) -> None:
        """Stop a named or detached group by name, even if its ranks hang or some have died.

        Kills the living ranks and releases the resources of a detached group; those of a named group belong to the
        driver that started it. Unlike `shutdown`, does not wait until the processes have exited.

        Raises:
            ValueError: no such group in this driver's Ray namespace; the message lists the existing groups.
        """
        stop_processes(name_prefix)

    def spawn(self, prefix_set: Iterable[str] | None = None) -> dict[str, Self]:
        """Return a group for each role of colocated workers, or for the roles in `prefix_set`.

        The groups share the processes: shutting one down stops all.

        Raises:
            ValueError: an unknown role, or the group has one worker class without roles.
        """
        known = [role for role in self._classes if role != ONLY_ROLE]
        roles = known if prefix_set is None else list(prefix_set)
        if not known:
            raise ValueError(
                f"spawn() requires a group with roles, but group {self.name!r} has one worker class; start it with "
                "create_colocated_worker_cls({role: ...})"
            )
        if unknown := [role for role in roles if role not in known]:
            raise ValueError(f"group {self.name!r} does not have the roles {unknown}; its roles are {known}")
        groups = {}
        for role in roles:
            groups[role] = type(self).__new__(type(self))
            groups[role]._set(self._processes, self._classes, self._all_methods, role)
        return groups

    def wait_ready(self, timeout_s: float | None = None) -> None:
        """Wait until the constructor of every worker has returned. Raises as `CallFuture.get`."""
        self._processes.wait_ready(timeout_s)

    def hosts(self) -> list[HostInfo]:
        """Return where each rank runs. Waits for the constructors as `wait_ready` does."""
        return self._processes.wait_ready().hosts

    def check_alive(self, timeout_s: float = 1.0) -> None:
        """Check that every worker is alive, for a group that is not called for a while. Calls notice deaths themselves.

        Waits at most `timeout_s` seconds. A worker that runs a call or its constructor for longer counts as alive.

        Raises:
            WorkerDiedError: a worker has died; the message names it.
            WorkerError: a constructor raised.
        """
        self._processes.check_usable()
        generation = self._processes.generation
        pings = {rank: worker.tidemill_ping.remote() for rank, worker in enumerate(self.workers)}
        answers = CallFuture(
            Call(
                processes=self._processes,
                generation=generation,
                group=self.name,
                method="check_alive",
                receipts=pings,
                values={},
                collect=lambda _: None,
                is_batch_parts=False,
                timeout_s=timeout_s,
            )
        )
        with suppress(CallTimeoutError):  # a busy worker is alive
            self.wait_ready(timeout_s)
            answers.get()  # within the rest of timeout_s

    def dead_ranks(self, timeout_s: float = 1.0) -> list[int]:
        """Return the ranks whose processes have died, for a group that can `restart` them; see `dead_workers`."""
        return dead_workers(self.workers, timeout_s)

    def restart(self, ranks: Sequence[int]) -> None:
        """Replace the processes of `ranks` and construct their workers again, with the same arguments and resources.

        For workers that do not communicate with each other. The first call afterwards waits for the constructors, as
        `wait_ready` does. The new workers have no state: call again what set it up. Elements of `workers` change.
        A future from before raises WorkerDiedError if a process that was replaced had not answered it.

        Raises:
            RuntimeError: another driver started the group, or it was shut down.
            ValueError: the group has no such rank, or a rank is repeated.
        """
        if unknown := [rank for rank in ranks if rank not in range(self.world_size)]:
            raise ValueError(f"group {self.name!r} has the ranks 0 to {self.world_size - 1}, got {unknown}")
        if len(set(ranks)) < len(ranks):
            raise ValueError(f"restart requires each rank once, got {list(ranks)}; remove the repeated ones")
        self._processes.restart(ranks)
        self._tables, self._layouts = [], {}

    def mesh(self, name: str) -> MeshLayout:
        """Return the validated layout of a mesh that the workers registered.

        The first use of a mesh requests all meshes from the workers, and so does the first use of a mesh that was not
        registered then.

        Raises:
            ValueError: no rank registered the mesh (the message lists the registered ones), or it is invalid.
        """
        if name not in self._layouts:
            if not self._tables or not all(name in table for table in self._tables):
                self._tables = self._request_meshes()
            known = sorted({mesh for table in self._tables for mesh in table})
            if name not in known:
                raise ValueError(
                    f"group {self.name!r} has no mesh {name!r}; its workers registered {known}. Call register_mesh or "
                    "register_dispatch_collect_info on every rank first"
                )
            self._layouts[name] = MeshLayout.from_entries(name, [table.get(name) for table in self._tables])
        return self._layouts[name]

    def _request_meshes(self) -> list[dict[str, MeshEntry]]:
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
        """Return the number of shards into which calls over `mesh` split a batch."""
        return self.mesh(mesh).dp_size

    def call(self, spec: MethodSpec, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CallFuture:
        """Dispatch one call of a registered method and return its future; ignores `spec.blocking`."""
        calls = spec.mode.dispatch_fn(self, args, kwargs)
        collect_ranks = sorted(calls) if spec.mode.collect_ranks_fn is None else spec.mode.collect_ranks_fn(self)
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
        generation = self._processes.wait_ready()
        name = f"{self._classes[self._role].__name__}.{method}"
        flat_calls, upstreams = pack_calls(name, calls, generation.node)
        receipts: dict[int, ray.ObjectRef] = {}
        values: dict[int, ray.ObjectRef] = {}
        with self._processes.lock:
            for rank, (args, kwargs) in calls.items():
                sent = ((self._role, method, len(args), tuple(kwargs)), *flat_calls[rank], *upstreams.receipts)
                if rank in collect_ranks:
                    receipts[rank], values[rank] = self.workers[rank].tidemill_call.remote(*sent)
                else:
                    receipts[rank] = self.workers[rank].tidemill_call_uncollected.remote(*sent)
        return CallFuture(
            Call(
                processes=self._processes,
                generation=generation,
                group=self.name,
                method=method,
                receipts=receipts,
                values={rank: values[rank] for rank in collect_ranks},
                collect=collect,
                is_batch_parts=is_batch_parts,
                timeout_s=timeout_s,
                upstreams=upstreams.calls,
            )
        )

    def shutdown(self) -> None:
        """Kill the workers and their child processes, release the resources, and wait until the processes have exited.

        Does not wait for running calls. May be called again, and after `ray.shutdown()`, which has stopped all groups
        except detached ones.
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
                f"group {self.name!r} has the roles {list(self._classes)}; call {name!r} on one of the groups that "
                "spawn() returns"
            )
        cls = self._classes[self._role]
        problem = "the method has no @register, add it" if name in public_methods(cls) else "no such method"
        raise UnknownMethodError(
            f"{cls.__name__}.{name} cannot be called on group {self.name!r}: {problem}; "
            f"registered methods: {sorted(self._methods)}"
        )


def _bind_methods(cls: type[Worker], group_cls: type) -> _Methods:
    methods = {name: (spec, inspect.signature(getattr(cls, name))) for name, spec in registered_methods(cls).items()}
    taken = sorted(set(methods) & (set(dir(group_cls)) | {"name", "world_size", "workers"}))
    if taken:
        raise ValueError(
            f"{cls.__name__} registers {taken}, which are names of attributes of a worker group; rename the methods"
        )
    return methods
