"""Wires: a wire connects one trainer rank with one engine rank; the device selects its transport."""

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor
from torch.distributed.distributed_c10d import Store

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


def connect(store: Store, name: str, rank: int, device: torch.device, address: str, timeout_s: float) -> Wire:
    """Return the wire of that name once both sides have connected: gloo for host memory, NCCL for GPU memory.

    Args:
        store: store through which the sides find each other.
        name: name of the wire, the same on both sides.
        rank: TRAINER or ENGINE.
        device: device of the memory that is sent or received.
        address: address of this machine on which gloo listens. NCCL has its own settings (NCCL_SOCKET_IFNAME).
        timeout_s: longest wait for the other side.

    Raises:
        WireError: the other side did not connect.
    """
    if device.type == "cpu":
        from tidemill_weight_update.transport.gloo import GlooWire

        return GlooWire(store, name, rank, address, timeout_s)
    from tidemill_weight_update.transport.nccl import NcclWire

    return NcclWire(store, name, rank, device, timeout_s)
