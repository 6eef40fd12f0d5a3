"""What runs in a worker's process: the actor that holds the user's workers.

The user's classes travel as bytes and are imported only after the environment is set, so that variables which libraries
read at import (OMP_NUM_THREADS) take effect in one of Ray's prestarted processes; a runtime_env would start a new one.
"""

import asyncio
import inspect
import os
import socket
from collections.abc import Callable, Mapping
from typing import Any

import ray

from tidemill_dispatch.method import MethodSpec, registered_methods
from tidemill_dispatch.ray.chain import rows_of
from tidemill_dispatch.ray.failure import Failure
from tidemill_dispatch.ray.inputs import CallInputs
from tidemill_dispatch.ray.pickling import pack, unpacked
from tidemill_dispatch.ray.rendezvous import HostInfo, rank_environment, reserve_port
from tidemill_dispatch.ray.roles import ONLY_ROLE, RayClassWithInitArgs, public_methods
from tidemill_dispatch.worker import Worker

CallHeader = tuple[str, str, int, tuple[str, ...]]
"""Role, method, number of positional arguments, names of the others. One tuple: Ray pickles each argument by itself."""
Receipt = Failure | int | None
"""What every rank returns of a call: why it failed, or the number of rows if it sent a batch."""


class WorkerHost:
    """The actor. Its methods start with `tidemill_`; the users' own are added as stubs by `host_class`."""

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
        """Sets the environment, imports the users' classes and makes the workers."""
        self._record = record
        os.environ.update(env_vars)
        os.environ.update(rank_environment(rank, infos))
        try:
            for role, (cls, args, kwargs) in unpacked(payload).items():
                self._specs[role] = registered_methods(cls)
                self._workers[role] = cls(*args, **kwargs)
        except Exception as error:  # noqa: BLE001 - sent to the driver, which raises it
            return Failure.of(error), None
        return None, None

    @ray.method(num_returns=2)
    def tidemill_call(self, header: CallHeader, *sent: Any) -> tuple[Receipt, Any]:
        """Calls a worker. The first return value is small and always fetched, the second is the result."""
        return self._call(header, sent)

    def tidemill_call_unsent(self, header: CallHeader, *sent: Any) -> Receipt:
        """Calls a worker whose result is not collected."""
        return self._call(header, sent)[0]

    def _call(self, header: CallHeader, sent: tuple[Any, ...]) -> tuple[Receipt, Any]:
        role, method, num_args, keys = header
        num_values = num_args + len(keys)
        try:
            worker = self.tidemill_worker(role)
            spec = self._specs[role].get(method)
            inputs = CallInputs(sent[num_values:], None if spec is None else spec.mode.padding)
            values = [inputs.take(value) for value in sent[:num_values]]
            kwargs = dict(zip(keys, values[num_args:], strict=True))
            result = inputs.finish(self.tidemill_run(getattr(worker, method)(*values[:num_args], **kwargs)))
        except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001 - sent to the driver
            return Failure.of(error), None
        return rows_of(result), result

    def tidemill_ping(self) -> None:
        """Answers when the calls before it are done; fails when the process is gone."""

    def tidemill_identity(self) -> tuple[Any, Any]:
        """For those who find the group by name: what its maker recorded, and the worker classes by role."""
        classes = {role: type(worker) for role, worker in self._workers.items()}
        return self._record, pack("the classes of the workers", classes)

    def tidemill_worker(self, role: str) -> Worker:
        if role not in self._workers:
            raise RuntimeError("the worker was not constructed; see the error of '__init__'")
        return self._workers[role]

    def tidemill_run(self, result: Any) -> Any:
        """What an async method returns, run to its end on this process's event loop; other results as they are."""
        if not inspect.iscoroutine(result):
            return result
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
        return self._loop.run_until_complete(result)


def _stub(role: str, name: str) -> Callable[..., Any]:
    def stub(self: WorkerHost, *args: Any, **kwargs: Any) -> Any:
        return self.tidemill_run(getattr(self.tidemill_worker(role), name)(*args, **kwargs))

    return stub


def host_class(roles: Mapping[str, RayClassWithInitArgs]) -> type[WorkerHost]:
    """The actor class for workers of `roles`: named after them, with their public methods for direct calls by handle.

    The methods have their own names; in a group of several roles, the role's name and an underscore before them.
    """
    stubs = {
        name if role == ONLY_ROLE else f"{role}_{name}": _stub(role, name)
        for role, init in roles.items()
        for name in public_methods(init.cls)
    }
    return type("+".join(init.cls.__name__ for init in roles.values()), (WorkerHost,), stubs)
