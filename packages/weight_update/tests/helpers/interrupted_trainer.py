"""Trainers whose updates are cut short."""

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
from remote_engines import FarEngine, Rank, resources, settled, steady, stopwatch
from tidemill_testing import ranks
from tidemill_weight_update import GroupLink, LocalShard, UpdateStats, WeightUpdater
from tidemill_weight_update.control.request import TOKEN_VARIABLE
from torch import Tensor
from toy_engines import ToyEngine, freshly_loaded, same, tensors

DEADLINE_S = 4
AFTER = 8
"""Tensors that were drawn from the generator when it happens: some buckets have arrived, and more are to come."""


def shards(seed: int, rank: int, size: int, device: str) -> Iterator[tuple[str, Tensor | LocalShard]]:
    """Of tensors that can be cut evenly, each rank's part; the others are rank 0's."""
    for name, tensor in ((name, tensor.to(device)) for name, tensor in tensors(seed).items()):
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
        device: of the trainer's tensors.
        world_size: of the trainer.
        timeout_s: of the update.
        victim: a process, or "rank 0" or "rank 1" of the trainer.
    """

    folder: str
    engines: list[list[str]]
    device: str
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
    quarantined: dict[str, str]
    before: tuple[int, ...]
    after: tuple[int, ...]
    versions: list[str]


def _main(plan: Plan, rank: int, token: str, result: Connection) -> None:
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
    first.update(shards(1, rank, plan.world_size, plan.device), 1)
    first.close()
    before = steady(resources)
    second = updater(plan.timeout_s)
    second.update(shards(2, rank, plan.world_size, plan.device), 2)

    def cut_short() -> Iterator[tuple[str, Tensor | LocalShard]]:
        for index, item in enumerate(shards(3, rank, plan.world_size, plan.device)):
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
        quarantined=stats[0].quarantined if stats else {},
        before=before,
        after=settled(resources, lambda now: no_more(now, before)),
        versions=[client.version for client in clients],
    )
    result.send(outcome)
    os._exit(0)  # the group of a rank that was killed cannot be destroyed in order


def run(
    folder: Path,
    engines: list[list[Rank]],
    victim: int | str,
    how: signal.Signals,
    world_size: int = 2,
    device: str = "cpu",
) -> list[Outcome | None]:
    """What the trainer's ranks say about the update; None: killed."""
    plan = Plan(
        folder=str(folder),
        engines=[[rank.path for rank in engine] for engine in engines],
        device=device,
        world_size=world_size,
        timeout_s=DEADLINE_S,
        victim=victim,
        signal=how,
        after=AFTER,
    )
    pipes = [ranks.context().Pipe(duplex=False) for _ in range(world_size)]
    trainers = [
        ranks.context().Process(target=_main, args=(plan, rank, os.environ[TOKEN_VARIABLE], pipe), daemon=True)
        for rank, (_, pipe) in enumerate(pipes)
    ]
    for trainer, (_, pipe) in zip(trainers, pipes, strict=True):
        trainer.start()
        pipe.close()
    try:
        outcomes = [_outcome(pipe) for pipe, _ in pipes]
    finally:
        for trainer in trainers:
            trainer.kill()
            trainer.join()
    return outcomes


def _outcome(pipe: Connection) -> Outcome | None:
    assert pipe.poll(100), "a trainer rank hangs"
    try:
        return pipe.recv()
    except EOFError:
        return None


def no_more(now: tuple[int, ...], then: tuple[int, ...]) -> bool:
    return all(left <= right for left, right in zip(now, then, strict=True))


def check_survivor(outcome: Outcome | None) -> Outcome:
    assert outcome is not None
    assert outcome.seconds < 2 * DEADLINE_S + 2  # an engine's deadline may begin when the trainer's is nearly over
    assert no_more(outcome.after, outcome.before)  # fewer: to who was killed
    return outcome


def check_usable(ranks: list[Rank], *, fresh: bool = False, device: str = "cpu") -> None:
    """The processes obey again, and another trainer can update them.

    Args:
        fresh: they make another engine than before.
        device: of the trainer's tensors.
    """
    started = time.monotonic()
    engine = FarEngine([rank.path for rank in ranks], fresh=fresh)
    engine.ask_all("resources")
    assert time.monotonic() - started < DEADLINE_S + 2
    updater = WeightUpdater([engine], bucket_bytes=300, link=GroupLink(), timeout_s=20)
    checkpoint = tensors(9)
    assert updater.update({name: tensor.to(device) for name, tensor in checkpoint.items()}.items(), 9).verified
    assert same(engine.state(), freshly_loaded(ToyEngine(len(ranks)), checkpoint))
    updater.close()
    engine.close()
