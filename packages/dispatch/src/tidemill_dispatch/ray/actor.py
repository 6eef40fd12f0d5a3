"""The actor in each worker's process, which holds the user's workers.

The user's classes are sent as bytes and imported after the environment variables are set, so that variables that
libraries read at import (OMP_NUM_THREADS) take effect in one of Ray's prestarted processes. A Ray `runtime_env` would
start a new process.
"""

import asyncio
import inspect
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ray

from tidemill_dispatch.batch import is_batch, own_copy, without_padding
from tidemill_dispatch.method import MethodSpec, registered_methods
from tidemill_dispatch.ray.chain import ChainedShard
from tidemill_dispatch.ray.failure import Failure
from tidemill_dispatch.ray.pickling import Packed, pack, unpacked
from tidemill_dispatch.ray.rendezvous import HostInfo, interface_environment, rank_environment, reserve_port
from tidemill_dispatch.ray.roles import RayClassWithInitArgs, direct_methods
from tidemill_dispatch.sharding import PaddedShard, Padding
from tidemill_dispatch.worker import Worker

CallHeader = tuple[str, str, int, tuple[str, ...]]
"""Role, method, number of positional arguments, names of keyword arguments. One tuple: Ray pickles each argument."""
Receipt = Failure | int | None
"""Small return value of each rank: its failure, or the number of rows of its result, or None if it is no batch."""


class _CallInputs:
    """Unpacks the arguments of one call, and removes their padding from its result.

    Args:
        receipts: receipts of the upstream calls.
        padding: padding with which the method is registered.
    """

    def __init__(self, receipts: Sequence[Any], padding: Padding | None):
        self._receipts = receipts
        self._padding = padding
        self._shard: PaddedShard | None = None
        self._chained: list[tuple[str, int]] = []

    def unpack(self, value: Any) -> Any:
        """Return the argument that the method receives; a batch as its own copy.

        Raises:
            ValueError: a shard has another number of rows than the other batches of the call.
            As `ChainedShard.fetch` and `PaddedShard.pad`.
        """
        if isinstance(value, Packed):
            value = value.unpack()
        elif isinstance(value, ChainedShard):
            shard = value.fetch(self._receipts)
            if value.is_whole:
                return own_copy(shard.rows)
            self._check_rows(f"{value.upstream.method!r} of group {value.upstream.group!r}", shard.num_real)
            value = shard
        if not isinstance(value, PaddedShard):
            return own_copy(value)
        self._shard = value
        return own_copy(value.rows if self._padding is None else value.pad(self._padding))

    def _check_rows(self, source: str, num_rows: int) -> None:
        self._chained.append((source, num_rows))
        if num_rows != self._chained[0][1]:
            rows = ", ".join(f"{name}: {length}" for name, length in self._chained)
            raise ValueError(
                f"all batches of a call must have the same number of rows; the shards of this rank have {rows}"
            )

    def unpad(self, result: Any) -> Any:
        """Return the method's result without padding of `Padding` and of the method; raises as `PaddedShard.unpad`."""
        if self._shard is not None and self._padding is not None:
            result = self._shard.unpad(result, self._padding)
        return without_padding(result)


class WorkerActor:
    """The actor. Its own methods start with `tidemill_`; `actor_class` adds the public methods of the workers."""

    def __init__(self) -> None:
        self._workers: dict[str, Worker] = {}
        self._specs: dict[str, dict[str, MethodSpec]] = {}
        self._record: Any = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._port = reserve_port()

    def tidemill_describe(self) -> HostInfo:
        return HostInfo(
            node_id=ray.get_runtime_context().get_node_id(),
            node_ip=ray.util.get_node_ip_address(),
            hostname=socket.gethostname(),
            pid=os.getpid(),
            process_group=os.getpgid(0),
            port=self._port.getsockname()[1],
        )

    @ray.method(num_returns=2)
    def tidemill_construct(
        self, payload: Any, env_vars: dict[str, str], rank: int, record: Any, *infos: HostInfo
    ) -> tuple[Receipt, None]:
        """Set the environment, import the user's classes and construct the workers."""
        self._record = record
        os.environ.update(env_vars)
        os.environ.update(rank_environment(rank, infos))
        os.environ.update(interface_environment(rank, infos, os.environ))
        try:
            for role, (cls, args, kwargs) in unpacked(payload).items():
                self._specs[role] = registered_methods(cls)
                self._workers[role] = cls(*args, **kwargs)
        except SystemExit:
            raise  # the process ends
        except BaseException as error:  # noqa: BLE001 - sent to the driver, which raises it
            return Failure.from_exception(error), None
        return None, None

    @ray.method(num_returns=2)
    def tidemill_call(self, header: CallHeader, *sent: Any) -> tuple[Receipt, Any]:
        """Call a worker. The first return value is small and always fetched, the second is the result."""
        return self._call(header, sent)

    def tidemill_call_uncollected(self, header: CallHeader, *sent: Any) -> Receipt:
        """Call a worker whose result is not collected."""
        return self._call(header, sent)[0]

    def _call(self, header: CallHeader, sent: tuple[Any, ...]) -> tuple[Receipt, Any]:
        role, method, num_args, keys = header
        num_values = num_args + len(keys)
        try:
            worker = self.tidemill_worker(role)
            spec = self._specs[role].get(method)
            inputs = _CallInputs(sent[num_values:], None if spec is None else spec.mode.padding)
            values = [inputs.unpack(value) for value in sent[:num_values]]
            kwargs = dict(zip(keys, values[num_args:], strict=True))
            result = inputs.unpad(self.tidemill_run(getattr(worker, method)(*values[:num_args], **kwargs)))
        except SystemExit:
            raise  # the process ends
        except BaseException as error:  # noqa: BLE001 - sent to the driver, which raises it
            return Failure.from_exception(error), None
        return len(result) if is_batch(result) else None, result

    def tidemill_ping(self) -> None:
        """Return when the earlier calls are done. Ray raises on the driver if the process is gone."""

    def tidemill_identity(self) -> tuple[Any, Any]:
        """Return the group's record and the worker classes by role, for drivers that find the group by name."""
        classes = {role: type(worker) for role, worker in self._workers.items()}
        return self._record, pack("the classes of the workers", classes)

    def tidemill_worker(self, role: str) -> Worker:
        if role not in self._workers:
            raise RuntimeError("the worker was not constructed; see the error of '__init__'")
        return self._workers[role]

    def tidemill_run(self, result: Any) -> Any:
        """Run the coroutine of an async method to completion on this process's event loop; return others unchanged."""
        if not inspect.iscoroutine(result):
            return result
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
        return self._loop.run_until_complete(result)


def _direct_method(role: str, name: str) -> Callable[..., Any]:
    def method(self: WorkerActor, *args: Any, **kwargs: Any) -> Any:
        return self.tidemill_run(getattr(self.tidemill_worker(role), name)(*args, **kwargs))

    return method


def actor_class(roles: Mapping[str, RayClassWithInitArgs]) -> type[WorkerActor]:
    """Return the actor class for workers of `roles`, with their public methods for direct calls on an actor handle.

    The class is named after the worker classes. In a group of several roles, a method's name is `role_method`.
    """
    methods = {name: _direct_method(role, method) for name, (role, method) in direct_methods(roles).items()}
    return type("+".join(init.cls.__name__ for init in roles.values()), (WorkerActor,), methods)
