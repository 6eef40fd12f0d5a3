"""All-reduces with a rank on another node, and between the GPUs of this one."""

import json
import os
import socket
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import ProcessExitedException, spawn

from tidemill_trainer.doctor.links import Link, rounds

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
    try:
        fd = None if listener is None else listener.detach()
        store = dist.TCPStore(address, port, 2, rank == 0, _TIMEOUT, master_listen_fd=fd)  # pyright: ignore[reportPrivateImportUsage]
    except RuntimeError as error:
        return Link(error=_first_line(error))
    return _measure(rank, store, "cuda:0" if torch.cuda.is_available() else "cpu")


def measure_gpus() -> dict[str, Link]:
    """Measure all-reduces between all pairs of GPUs of this node; return the links by the names of the GPUs."""
    return measure_devices([f"cuda:{index}" for index in range(torch.cuda.device_count())])


def measure_devices(devices: Sequence[str]) -> dict[str, Link]:
    """Measure all-reduces between all pairs of devices of this node, with a process for each device.

    The first failure ends the measurement: its pair has the error, and later pairs are absent.
    """
    if len(devices) < 2:
        return {}
    with tempfile.TemporaryDirectory(prefix="tidemill-links-") as folder:
        error = ""
        try:
            spawn(_measure_pairs, (devices, folder), nprocs=len(devices))
        except ProcessExitedException as exited:
            error = _first_line(exited)
        files = sorted(Path(folder).glob("*.json"))
        links = {file.stem: Link(**json.loads(file.read_text())) for file in files}
    if error and not any(link.error for link in links.values()):
        links["GPUs"] = Link(error=error)
    return links


def _measure_pairs(own: int, devices: Sequence[str], folder: str) -> None:
    """Measure the pairs of one device; write each link to a file, and exit after a failure."""
    os.environ |= {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
    for pairs in rounds([str(index) for index in range(len(devices))]):
        for pair in pairs:
            if str(own) not in pair:
                continue
            rank, name = pair.index(str(own)), f"GPU {pair[0]} to GPU {pair[1]}"
            store = dist.FileStore(os.path.join(folder, name), 2)  # pyright: ignore[reportPrivateImportUsage]
            link = _measure(rank, store, devices[own])
            if rank == 0 or link.error:
                Path(folder, f"{name}.json").write_text(json.dumps(asdict(link)))
            if link.error:
                sys.exit(1)


def _measure(rank: int, store: dist.Store, device: str) -> Link:  # pyright: ignore[reportPrivateImportUsage]
    backend = "nccl" if device.startswith("cuda") else "gloo"
    store.set_timeout(_TIMEOUT)
    try:
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
