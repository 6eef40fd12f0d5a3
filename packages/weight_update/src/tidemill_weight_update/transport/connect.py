"""The choice of a transport."""

import torch

from tidemill_weight_update.transport.gloo import GlooWire
from tidemill_weight_update.transport.signed_store import SignedStore
from tidemill_weight_update.transport.wire import Wire


def connect(store: SignedStore, name: str, rank: int, device: torch.device, address: str, timeout_s: float) -> Wire:
    """The wire of that name, when both sides have come.

    Args:
        store: where the sides find each other.
        rank: TRAINER or ENGINE.
        device: of the memory that is sent and received: gloo for host memory, NCCL for GPUs.
        address: of this machine, on which gloo listens. NCCL has its own settings (NCCL_SOCKET_IFNAME).

    Raises:
        WireError: the other side did not come.
    """
    if device.type == "cpu":
        return GlooWire(store, name, rank, address, timeout_s)
    from tidemill_weight_update.transport.nccl import NcclWire

    return NcclWire(store, name, rank, device, timeout_s)
