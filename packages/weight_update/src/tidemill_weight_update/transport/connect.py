"""The choice of a transport by device."""

import torch
from torch.distributed.distributed_c10d import Store

from tidemill_weight_update.transport.gloo import GlooWire
from tidemill_weight_update.transport.wire import Wire


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
        return GlooWire(store, name, rank, address, timeout_s)
    from tidemill_weight_update.transport.nccl import NcclWire

    return NcclWire(store, name, rank, device, timeout_s)
