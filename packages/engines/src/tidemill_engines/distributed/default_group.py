"""torch's default process group. Engines share it: the first one creates it if absent, the last one destroys it."""

# torch documents stores and rendezvous, but does not export them.
# pyright: reportPrivateImportUsage=false
import itertools
import os
import socket
from dataclasses import dataclass
from datetime import timedelta
from functools import cache

import torch
import torch.distributed as dist

_ENV = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_numbers = itertools.count()


@dataclass(slots=True)
class _Made:
    """The default group that engines of this process have created, and the number of engines that use it."""

    group: dist.ProcessGroup | None = None
    num_engines: int = 0

    def is_current(self) -> bool:
        return self.group is not None and dist.is_initialized() and dist.group.WORLD is self.group


_made = _Made()


def join_default_group(device: torch.device, timeout: timedelta) -> bool:
    """Create torch's default process group, if absent, from the environment or for this process alone.

    Returns:
        Whether engines have created the group; then call `leave_default_group` later.

    Raises:
        ValueError: the environment has some, but not all of RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT.
    """
    if dist.is_initialized() and not _made.is_current():
        return False
    if not dist.is_initialized():
        _init_default_group("gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl", timeout)
        _made.group, _made.num_engines = dist.group.WORLD, 0
    _made.num_engines += 1
    return True


def leave_default_group() -> None:
    """Destroy the default group, and with it all other groups, if no other engine uses it."""
    _made.num_engines -= 1
    if not _made.num_engines and _made.is_current():
        dist.destroy_process_group()


def _init_default_group(backend: str, timeout: timedelta) -> None:
    if "RANK" not in os.environ and "WORLD_SIZE" not in os.environ:
        store = dist.HashStore()
        dist.init_process_group(backend, store=store, rank=0, world_size=1, timeout=timeout)
        return
    missing = [name for name in _ENV if name not in os.environ]
    if missing:
        raise ValueError(
            f"expected {', '.join(_ENV)} in the environment, {', '.join(missing)} not set; start with torchrun, set "
            "all of them, or unset RANK and WORLD_SIZE to run as one process"
        )
    rank, world_size, address, port = (os.environ[name] for name in _ENV)
    store = dist.PrefixStore(f"tidemill {next(_numbers)}", _store(rank, world_size, address, port, timeout))
    dist.init_process_group(backend, store=store, rank=int(rank), world_size=int(world_size), timeout=timeout)


@cache
def _store(rank: str, world_size: str, address: str, port: str, timeout: timedelta) -> dist.Store:
    """Create the store for these addresses, once per process.

    `init_process_group` would reuse the entries of an earlier default group in the store, and connect to its addresses.
    A store of this process at a loopback address listens there alone; torch's own socket listens on all addresses.
    """
    if rank == "0" and _is_loopback(address) and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        listening = socket.create_server((address, int(port))).detach()
        return dist.TCPStore(address, int(port), int(world_size), True, timeout, master_listen_fd=listening)
    store, _, _ = next(dist.rendezvous("env://", timeout=timeout))
    return store


def _is_loopback(address: str) -> bool:
    return address == "localhost" or address.startswith("127.")
