"""A trainer in miniature: sends checkpoints to an engine that lives in another process. Run as a script.

    trainer_script.py JSON   {"folder", "device", "bucket_bytes", "dtype", "checkpoints": [path, ...], "rounds", "link"}

Started once per rank, with RANK and WORLD_SIZE in the environment. Rank 0 sends what it asks of the engine through the
unix socket `folder/engine`, and at the end the statistics of each update. With `link` it says that it is on another
machine, and counts in `sent` the bytes that it sends over the link.
"""

import dataclasses
import json
import os
import sys
from collections.abc import Iterator
from multiprocessing.connection import Client, Connection

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from tidemill_weight_update import BucketHandle, GroupLink, PauseMode, Request, WeightUpdater
from tidemill_weight_update.remote import store_mailbox
from tidemill_weight_update.transport import gloo as wire


class EngineProxy:
    """An engine behind a connection, as one behind a Ray actor would be."""

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
    """The checkpoint's tensors, sharded over all ranks if there are several; tied output embeddings left out."""
    state = load_file(os.path.join(path, "model.safetensors"), device=device)
    if dist.is_initialized():
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import Shard, distribute_tensor

        mesh = init_device_mesh(device, (dist.get_world_size(),))
        state = {name: distribute_tensor(tensor, mesh, [Shard(0)]) for name, tensor in state.items()}
    yield from state.items()


def be_elsewhere() -> list[int]:
    """Makes links believe that this process is on another machine; the sizes of what is sent come into the list."""
    sent: list[int] = []

    def send(self, data, original=wire.GlooWire.send) -> None:
        sent.append(data.numel())
        original(self, data)

    store_mailbox.here = lambda: "another machine"
    wire.GlooWire.send = send
    return sent


def main() -> None:
    spec = json.loads(sys.argv[1])
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if world_size > 1:
        store = f"file://{spec['folder']}/store"
        dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world_size)
    connection = Client(os.path.join(spec["folder"], "engine"), authkey=b"test") if rank == 0 else None
    engines = [] if connection is None else [EngineProxy(connection)]
    dtype = None if spec["dtype"] is None else getattr(torch, spec["dtype"])
    link = GroupLink() if spec["link"] else None
    updater = WeightUpdater(engines, bucket_bytes=spec["bucket_bytes"], dtype=dtype, link=link)
    sent = be_elsewhere() if spec["link"] else []
    stats = []
    for version in range(spec["rounds"]):
        for path in spec["checkpoints"]:
            done = updater.update(tensors(path, spec["device"]), f"{path}#{version}")
            stats.append(dataclasses.asdict(done) | {"sent": sum(sent)})
            sent.clear()
    updater.close()
    if connection is not None:
        connection.send(("done", stats, {}))
    if world_size > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
