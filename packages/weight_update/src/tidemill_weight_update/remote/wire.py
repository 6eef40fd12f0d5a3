"""Wires: a wire connects one trainer rank with one engine rank; here the one for host memory, over TCP."""

import contextlib
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Protocol

from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, ProcessGroupGloo, Store, Work

TRAINER, ENGINE = 0, 1
"""Ranks of the two sides of a wire."""


class WireError(RuntimeError):
    """A wire that broke, or on which nothing moved in time. It cannot be used again."""


class Wire(Protocol):
    """A connection that carries one transfer at a time: `send` or `recv` starts it, `wait` completes it.

    `data` is a contiguous uint8 tensor. If it is on a GPU, the caller has synchronized the device.
    """

    def send(self, data: Tensor) -> None: ...

    def recv(self, data: Tensor) -> None: ...

    def wait(self, timeout_s: float, check: Callable[[], None]) -> None:
        """Return when the transfer is complete: the memory may be reused, or is filled.

        Args:
            check: raises if the wait has become pointless. Not every wire calls it.

        Raises:
            WireError: the wire broke, or the transfer took longer than `timeout_s`.
        """
        ...

    def close(self) -> None:
        """Close this side, independent of the other side."""
        ...


class GlooWire:
    """Host memory over TCP, by torch's gloo backend.

    A running transfer cannot be polled, only waited for: gloo closes the connection when a wait times out. If the other
    process exits or closes its side, the wait ends at once.
    """

    def __init__(self, store: Store, name: str, rank: int, address: str, timeout_s: float) -> None:
        options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._timeout = timedelta(seconds=timeout_s)
        options._threads = 1
        try:
            options._devices = [ProcessGroupGloo.create_device(hostname=address)]
            self._group = ProcessGroupGloo(PrefixStore(name, store), rank, 2, options)
        except RuntimeError as error:
            raise WireError(f"could not be connected ({_reason(error)})") from error
        self._peer = 1 - rank
        self._work: Work | None = None

    def send(self, data: Tensor) -> None:
        with _as_wire_error():
            self._work = self._group.send([data], self._peer, 0)  # type: ignore[attr-defined]

    def recv(self, data: Tensor) -> None:
        with _as_wire_error():
            self._work = self._group.recv([data], self._peer, 0)  # type: ignore[attr-defined]

    def wait(self, timeout_s: float, check: Callable[[], None]) -> None:
        work, self._work = self._work, None
        assert work is not None, "call send or recv before wait"
        with _as_wire_error():
            work.wait(timedelta(seconds=timeout_s))

    def close(self) -> None:
        self._work = None
        self._group.abort()
        # Its threads, sockets and files live as long as the group, but the traceback of an error may keep this object.
        del self._group


@contextlib.contextmanager
def _as_wire_error() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise WireError(f"broke ({_reason(error)})") from error


def _reason(error: RuntimeError) -> str:
    """Return gloo's message without its source location."""
    return str(error).splitlines()[0].split("] ", 1)[-1]
