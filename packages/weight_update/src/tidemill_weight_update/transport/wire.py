"""The interface of a transport: a wire connects one trainer rank with one engine rank."""

from collections.abc import Callable
from typing import Protocol

from torch import Tensor

TRAINER, ENGINE = 0, 1
"""Ranks in a wire's group of two."""


class WireError(RuntimeError):
    """A wire that broke, or on which nothing moved for too long. It is of no further use."""


class Wire(Protocol):
    """One transfer at a time: `send` or `recv` starts it, `wait` ends it."""

    def send(self, data: Tensor) -> None: ...

    def recv(self, data: Tensor) -> None: ...

    def wait(self, timeout_s: float, check: Callable[[], None]) -> None:
        """Returns when the transfer is over; the memory is free, or filled, then.

        Args:
            check: raises if waiting is of no use. Not every wire calls it.

        Raises:
            WireError: it broke, or took longer than `timeout_s`.
        """
        ...

    def close(self) -> None:
        """Ends it on this side, whatever the other side does."""
        ...
