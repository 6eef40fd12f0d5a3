"""What runs in a worker's process: the actor that holds the user's worker.

The user's class travels as bytes and is imported only after the environment is set, so that variables which libraries
read at import (OMP_NUM_THREADS) take effect in one of Ray's prestarted processes; a runtime_env would start a new one.
"""

import os
import re
import socket
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError

from tidemill_dispatch.ray.arguments import Packed
from tidemill_dispatch.worker import Worker

CallHeader = tuple[str, bool, int, tuple[str, ...]]
"""Method, whether the result is sent, number of positional arguments, names of the others. One tuple: Ray pickles every
argument of a call by itself."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HostInfo:
    """Where a rank runs, and the port that it holds for the process group."""

    node_id: str
    node_ip: str
    hostname: str
    pid: int
    process_group: int
    port: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """An exception of a worker, as plain text: exceptions of user code need not survive pickling."""

    host: str
    error_type: str
    error_message: str
    remote_traceback: str
    time_s: float

    @classmethod
    def of(cls, error: BaseException) -> "Failure":
        kind = type(error)
        name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
        inner = error.__traceback__.tb_next if error.__traceback__ is not None else None  # without the host's own frame
        return cls(
            host=f"{socket.gethostname()}:{os.getpid()}",
            error_type=name,
            error_message=str(error),
            remote_traceback="".join(traceback.format_exception(kind, error, inner)),
            time_s=time.time(),
        )

    @classmethod
    def of_ray(cls, host: str, error: RayError) -> "Failure":
        """What Ray raised around a worker's method, for example for a result that cannot be pickled."""
        cause = error.cause if isinstance(error, RayTaskError) and isinstance(error.cause, BaseException) else error
        return cls(
            host=host,
            error_type=type(cause).__qualname__,
            error_message=str(cause),
            remote_traceback=re.sub(r"\x1b\[\d*m", "", str(error)),  # Ray colours its tracebacks
            time_s=time.time(),
        )


def reserve_port() -> socket.socket:
    """Binds a free TCP port on all interfaces without listening.

    As long as the socket is open the kernel gives the port to nobody who asks for any free port. A server that asks
    for this very port with SO_REUSEADDR, as torch's TCPStore does, gets it: so there is no moment at which the port is
    free for others, unlike "bind, close, and hope".
    """
    if socket.has_dualstack_ipv6():
        held = socket.socket(socket.AF_INET6)
        held.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
    else:
        held = socket.socket(socket.AF_INET)
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("", 0))
    return held


def rank_environment(rank: int, infos: tuple[HostInfo, ...]) -> dict[str, str]:
    """The variables that torch's `env://` rendezvous reads; a group on one node meets on the loopback address."""
    nodes = [info.node_id for info in infos]
    one_node = len(set(nodes)) == 1
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(len(infos)),
        "LOCAL_RANK": str(nodes[:rank].count(nodes[rank])),
        "LOCAL_WORLD_SIZE": str(nodes.count(nodes[rank])),
        "MASTER_ADDR": "127.0.0.1" if one_node else infos[0].node_ip,
        "MASTER_PORT": str(infos[0].port),
    }


class WorkerHost:
    """The actor. Its methods start with `tidemill_`; the user's own are added as stubs by `host_class`."""

    def __init__(self) -> None:
        self._worker: Worker | None = None
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
        self, payload: Any, env_vars: dict[str, str], rank: int, *infos: HostInfo
    ) -> tuple[Failure | None, None]:
        """Sets the environment, imports the user's class and makes the worker."""
        os.environ.update(env_vars)
        os.environ.update(rank_environment(rank, infos))
        try:
            cls, args, kwargs = _unpacked(payload)
            self._worker = cls(*args, **kwargs)
        except Exception as error:  # noqa: BLE001 - sent to the driver, which raises it
            return Failure.of(error), None
        return None, None

    @ray.method(num_returns=2)
    def tidemill_call(self, header: CallHeader, *flat: Any) -> tuple[Failure | None, Any]:
        """Calls the worker. The first return value is small and always fetched, the second is the result."""
        method, send_result, num_args, keys = header
        try:
            values = [_unpacked(value) for value in flat]
            kwargs = dict(zip(keys, values[num_args:], strict=True))
            result = getattr(self.require_worker(), method)(*values[:num_args], **kwargs)
        except Exception as error:  # noqa: BLE001 - sent to the driver, which raises it
            return Failure.of(error), None
        return None, result if send_result else None

    def tidemill_ping(self) -> None:
        """Answers when the calls before it are done; fails when the process is gone."""

    def require_worker(self) -> Worker:
        if self._worker is None:
            raise RuntimeError("the worker was not constructed; see the error of '__init__'")
        return self._worker


def _unpacked(value: Any) -> Any:
    return value.unpack() if isinstance(value, Packed) else value


def _stub(name: str) -> Callable[..., Any]:
    def stub(self: WorkerHost, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.require_worker(), name)(*args, **kwargs)

    return stub


def host_class(cls: type[Worker], public_methods: Mapping[str, Any]) -> type[WorkerHost]:
    """The actor class for workers of `cls`: named after it, with its public methods for direct calls by handle."""
    return type(cls.__name__, (WorkerHost,), {name: _stub(name) for name in public_methods})
