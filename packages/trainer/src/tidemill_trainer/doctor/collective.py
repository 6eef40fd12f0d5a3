"""One all-reduce with a rank on another node."""

import socket
import time
from datetime import timedelta

import torch
import torch.distributed as dist

from tidemill_trainer.doctor.links import Link

_TIMEOUT = timedelta(seconds=20)
_LARGE_BYTES = 64 << 20
_REPEATS = 5


def measure_link(rank: int, address: str, port: int, listener: socket.socket | None) -> Link:
    """Measure all-reduces of two ranks: by NCCL on the first GPU of each node, else by gloo.

    Args:
        rank: 0 or 1.
        address, port: where rank 0 listens.
        listener: the socket of rank 0, which is used up.
    """
    device, backend = ("cuda:0", "nccl") if torch.cuda.is_available() else ("cpu", "gloo")
    try:
        fd = None if listener is None else listener.detach()
        store = dist.TCPStore(address, port, 2, rank == 0, _TIMEOUT, master_listen_fd=fd)  # pyright: ignore[reportPrivateImportUsage]
        dist.init_process_group(backend, store=store, rank=rank, world_size=2, timeout=_TIMEOUT)
    except RuntimeError as error:
        return Link(error=_first_line(error))
    try:
        small, large = (torch.zeros(size // 4, device=device) for size in (4, _LARGE_BYTES))

        def seconds(tensor: torch.Tensor) -> float:
            dist.all_reduce(tensor)  # connects
            started = time.perf_counter()
            for _ in range(_REPEATS):
                dist.all_reduce(tensor)
            tensor[0].item()  # waits for the GPU
            return (time.perf_counter() - started) / _REPEATS

        return Link(backend=backend, latency_s=seconds(small), bytes_per_s=_LARGE_BYTES / seconds(large))
    except RuntimeError as error:
        return Link(error=_first_line(error))
    finally:
        dist.destroy_process_group()


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0][:200]
