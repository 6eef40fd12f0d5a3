"""Small trainer that sends checkpoints to an engine in the process of the test."""

import dataclasses
import os
from collections.abc import Iterator
from multiprocessing.connection import Client, Connection

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from tidemill_weight_update import BucketHandle, GroupLink, PauseMode, Request, WeightUpdater
from tidemill_weight_update.control import board
from tidemill_weight_update.remote import wire

AUTHKEY = b"test"


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainerSpec:
    """What the trainer does.

    Attributes:
        folder: folder of the socket of the engine, shared by the ranks.
        world_size: number of trainer ranks.
        checkpoints: folders of the checkpoints that are sent in turn.
        device: device of the trainer's tensors.
        bucket_bytes: as in `WeightUpdater`.
        rounds: how many times the checkpoints are sent.
        link: whether the trainer pretends to be on another machine; then `sent` counts the bytes sent over the link.
    """

    folder: str
    world_size: int
    checkpoints: tuple[str, ...]
    device: str = "cpu"
    bucket_bytes: int = 1 << 16
    rounds: int = 1
    link: bool = False


class EngineProxy:
    """Client of an engine behind a connection, as it would be for an engine in a Ray actor."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def __repr__(self) -> str:
        return "EngineProxy"

    @property
    def tp_size(self) -> int:
        return self._call("tp_size")

    @property
    def has_loader(self) -> bool:
        return self._call("has_loader")

    def load(self, request: Request, *, flush_cache: bool) -> None:
        self._call("load", request, flush_cache=flush_cache)

    def load_bucket(self, bucket: BucketHandle) -> None:
        self._call("load_bucket", bucket)

    def flush_cache(self) -> None:
        self._call("flush_cache")

    def pause(self, mode: PauseMode) -> None:
        self._call("pause", mode)

    def resume(self) -> None:
        self._call("resume")

    def set_weight_version(self, version: str) -> None:
        self._call("set_weight_version", version)

    def get_weight_version(self) -> str:
        return self._call("get_weight_version")

    def _call(self, method: str, *args: object, **kwargs: object):
        self._connection.send((method, args, kwargs))
        ok, value = self._connection.recv()
        if not ok:
            raise RuntimeError(value)
        return value


def tensors(path: str, device: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the checkpoint's tensors without tied output embeddings, sharded over the ranks if there are several."""
    state = load_file(os.path.join(path, "model.safetensors"), device=device)
    if dist.is_initialized():
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import Shard, distribute_tensor

        mesh = init_device_mesh(device, (dist.get_world_size(),))
        state = {name: distribute_tensor(tensor, mesh, [Shard(0)]) for name, tensor in state.items()}
    yield from state.items()


def pretend_to_be_remote() -> list[int]:
    """Pretend that this process is on another machine; return a list that gets the size of each message sent."""
    sent: list[int] = []

    def send(self, data, original=wire.GlooWire.send) -> None:
        sent.append(data.numel())
        original(self, data)

    board.here = lambda: 1
    wire.GlooWire.send = send
    return sent


def main(spec: TrainerSpec, rank: int, environment: dict[str, str]) -> None:
    """Run one trainer rank.

    Rank 0 sends its calls of the engine through the unix socket `folder/engine`, and at the end the statistics of each
    update.
    """
    os.environ.clear()  # of the server that this process was forked from
    os.environ.update(environment, RANK=str(rank), WORLD_SIZE=str(spec.world_size))
    torch.set_num_threads(1)
    if spec.world_size > 1:
        store = f"file://{spec.folder}/store"
        dist.init_process_group("gloo", init_method=store, rank=rank, world_size=spec.world_size)
    connection = Client(os.path.join(spec.folder, "engine"), authkey=AUTHKEY) if rank == 0 else None
    engines = [] if connection is None else [EngineProxy(connection)]
    link = GroupLink() if spec.link else None
    updater = WeightUpdater(engines, bucket_bytes=spec.bucket_bytes, link=link)
    sent = pretend_to_be_remote() if spec.link else []
    stats = []
    for version in range(spec.rounds):
        for path in spec.checkpoints:
            done = updater.update(tensors(path, spec.device), f"{path}#{version}")
            stats.append(dataclasses.asdict(done) | {"sent": sum(sent)})
            sent.clear()
    updater.close()
    if connection is not None:
        connection.send(("done", stats, {}))
    if spec.world_size > 1:
        dist.destroy_process_group()
