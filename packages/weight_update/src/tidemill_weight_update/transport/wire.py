"""The interface of a transport: a wire connects one trainer rank with one engine rank."""

from collections.abc import Callable
from typing import Protocol

from torch import Tensor

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
