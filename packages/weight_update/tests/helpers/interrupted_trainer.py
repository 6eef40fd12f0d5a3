"""Trainer ranks in their own processes; during an update one process is killed or stopped."""

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
from remote_engines import RankProcess, RemoteEngine, resources, settled, steady
from sources import WithEvent
from tidemill_testing import ranks
from tidemill_weight_update import GroupLink, LocalShard, WeightUpdater
from torch import Tensor
from toy_engines import ToyEngine, freshly_loaded, same, tensors

DEADLINE_S = 4
AFTER = 8
"""Number of the tensor at which the signal is sent: some buckets have been loaded, others follow."""


def shards(seed: int, rank: int, size: int, device: str) -> Iterator[tuple[str, Tensor | LocalShard]]:
    """Yield the rank's shard of each tensor that can be sharded evenly; rank 0 also yields the other tensors."""
    for name, tensor in ((name, tensor.to(device)) for name, tensor in tensors(seed).items()):
        if tensor.ndim and tensor.shape[0] % size == 0:
            part = tensor.chunk(size)[rank].clone()
            start = (rank * part.shape[0], *[0] * (part.ndim - 1))
            yield name, LocalShard(tensor=part, global_shape=tuple(tensor.shape), start=start)
        elif rank == 0:
            yield name, tensor


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Scenario: at tensor number `after`, rank 0 sends the signal to `victim`.

    Attributes:
        folder: folder shared by the ranks.
        engines: sockets of the ranks of each engine.
        device: device of the trainer's tensors.
        world_size: number of trainer ranks.
        timeout_s: timeout of the update.
        victim: process id, or "rank 0" or "rank 1" for a trainer rank.
        signal: signal that is sent.
        after: number of the tensor at which it is sent.
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
    """Outcome of the update on one trainer rank.

    Attributes:
        error: message of the error, or "".
        quarantined: engines that failed, with the reasons.
        before: `resources()` before the update.
        after: `resources()` after the updater was closed.
        versions: versions of the engines.
    """

    error: str
    quarantined: dict[str, str]
    before: tuple[int, ...]
    after: tuple[int, ...]
    versions: list[str]


def _main(plan: Plan, rank: int, result: Connection) -> None:
    torch.set_num_threads(1)
    pid_file = Path(plan.folder) / f"rank {rank}"
    pid_file.write_text(str(os.getpid()))
    store = f"file://{plan.folder}/store"
    forty_s = timedelta(seconds=40)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=plan.world_size, timeout=forty_s)
    clients = [RemoteEngine(paths, f"engine {i}") for i, paths in enumerate(plan.engines)] if rank == 0 else []

    def updater(timeout_s: float) -> WeightUpdater:
        return WeightUpdater(clients, bucket_bytes=300, link=GroupLink(), timeout_s=timeout_s)

    first = updater(60)  # the engines record their plans
    first.update(shards(1, rank, plan.world_size, plan.device), 1)
    first.close()
    before = steady(resources)
    second = updater(plan.timeout_s)
    second.update(shards(2, rank, plan.world_size, plan.device), 2)

    def send_signal() -> None:
        if rank == 0:
            victim = plan.victim
            os.kill(victim if isinstance(victim, int) else int(pid_file.with_name(victim).read_text()), plan.signal)
            time.sleep(0.3)

    items = WithEvent(shards(3, rank, plan.world_size, plan.device), plan.after + 1, send_signal)
    error, quarantined = "", {}
    try:
        quarantined = second.update(items, 3).quarantined
    except Exception as raised:  # noqa: BLE001 - checked by the test
        error = str(raised)
    second.close()
    outcome = Outcome(
        error=error,
        quarantined=quarantined,
        before=before,
        after=settled(resources, lambda now: is_at_most(now, before)),
        versions=[client.version for client in clients],
    )
    result.send(outcome)
    os._exit(0)  # a process group with a killed rank cannot be destroyed


def run(
    folder: Path,
    engines: list[list[RankProcess]],
    victim: int | str,
    signal_number: signal.Signals,
    world_size: int = 2,
    device: str = "cpu",
) -> list[Outcome | None]:
    """Outcome on each trainer rank; None if the rank was killed."""
    plan = Plan(
        folder=str(folder),
        engines=[[rank.path for rank in engine] for engine in engines],
        device=device,
        world_size=world_size,
        timeout_s=DEADLINE_S,
        victim=victim,
        signal=signal_number,
        after=AFTER,
    )
    pipes = [ranks.context().Pipe(duplex=False) for _ in range(world_size)]
    trainers = [
        ranks.context().Process(target=_main, args=(plan, rank, pipe), daemon=True)
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
    assert pipe.poll(100), "a trainer rank did not report within 100 s"
    try:
        return pipe.recv()
    except EOFError:
        return None


def is_at_most(now: tuple[int, ...], then: tuple[int, ...]) -> bool:
    return all(left <= right for left, right in zip(now, then, strict=True))


def check_survivor(outcome: Outcome | None) -> Outcome:
    assert outcome is not None
    assert is_at_most(outcome.after, outcome.before)  # fewer if connections to the killed process are gone
    return outcome


def check_usable(ranks: list[RankProcess], *, fresh: bool = False, device: str = "cpu") -> None:
    """Check that the rank processes respond and that another trainer can update them.

    Args:
        fresh: whether the ranks make a new engine.
        device: device of the trainer's tensors.
    """
    engine = RemoteEngine([rank.path for rank in ranks], fresh=fresh)
    engine.ask_all("resources")
    updater = WeightUpdater([engine], bucket_bytes=300, link=GroupLink(), timeout_s=20)
    checkpoint = tensors(9)
    assert updater.update({name: tensor.to(device) for name, tensor in checkpoint.items()}.items(), 9).verified
    assert same(engine.state(), freshly_loaded(ToyEngine(len(ranks)), checkpoint))
    updater.close()
    engine.close()
