"""One rank of a trainer whose update is cut short."""

import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed as dist
from far_engines import FarEngine, resources, settled, stopwatch
from tidemill_weight_update import GroupLink, LocalShard, UpdateStats, WeightUpdater
from tidemill_weight_update.request import TOKEN_VARIABLE
from torch import Tensor
from toy_engines import tensors


def shards(seed: int, rank: int, size: int) -> Iterator[tuple[str, Tensor | LocalShard]]:
    """Of tensors that can be cut evenly, each rank's part; the others are rank 0's."""
    for name, tensor in tensors(seed).items():
        if tensor.ndim and tensor.shape[0] % size == 0:
            part = tensor.chunk(size)[rank].clone()
            yield name, LocalShard(tensor=part, global_shape=tuple(tensor.shape), dim=0, rank=rank, size=size)
        elif rank == 0:
            yield name, tensor


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What happens: rank 0 comes to tensor number `after` and sends `victim` the signal.

    Attributes:
        folder: that the ranks have in common.
        engines: the sockets of the ranks of each.
        world_size: of the trainer.
        timeout_s: of the update.
        victim: a process, or "rank 0" or "rank 1" of the trainer.
    """

    folder: str
    engines: list[list[str]]
    world_size: int
    timeout_s: float
    victim: int | str
    signal: signal.Signals
    after: int


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What became of the update: how long it took, its error or its statistics, `resources` before it and in the end,
    and the versions of the engines."""

    seconds: float
    error: str
    fenced: dict[str, str]
    before: tuple[int, ...]
    after: tuple[int, ...]
    versions: list[str]


def main(plan: Plan, rank: int, token: str, result: Connection) -> None:
    os.environ[TOKEN_VARIABLE] = token
    torch.set_num_threads(1)
    pid_file = Path(plan.folder) / f"rank {rank}"
    pid_file.write_text(str(os.getpid()))
    store = f"file://{plan.folder}/store"
    forty = timedelta(seconds=40)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=plan.world_size, timeout=forty)
    clients = [FarEngine(paths, f"engine {i}") for i, paths in enumerate(plan.engines)] if rank == 0 else []

    def updater(timeout_s: float) -> WeightUpdater:
        return WeightUpdater(clients, bucket_bytes=300, link=GroupLink(), timeout_s=timeout_s)

    first = updater(60)  # which teaches the engines their models
    first.update(shards(1, rank, plan.world_size), 1)
    first.close()
    before = settled(resources, None)
    second = updater(plan.timeout_s)
    second.update(shards(2, rank, plan.world_size), 2)

    def cut_short() -> Iterator[tuple[str, Tensor | LocalShard]]:
        for index, item in enumerate(shards(3, rank, plan.world_size)):
            yield item
            if rank == 0 and index == plan.after:
                victim = plan.victim
                os.kill(victim if isinstance(victim, int) else int(pid_file.with_name(victim).read_text()), plan.signal)
                time.sleep(0.3)

    stats: list[UpdateStats] = []
    seconds, error = stopwatch(lambda: stats.append(second.update(cut_short(), 3)))
    second.close()
    outcome = Outcome(
        seconds=seconds,
        error="" if error is None else str(error),
        fenced=stats[0].fenced if stats else {},
        before=before,
        after=settled(resources, before),
        versions=[client.version for client in clients],
    )
    result.send(outcome)
    os._exit(0)  # the group of a rank that was killed cannot be destroyed in order
