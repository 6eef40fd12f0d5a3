"""Stock SGLang for engines on the trainer's GPUs: the variants of `update_weights_from_tensor`.

Each method sends all tensors and flushes the prefix cache once. Its clock stops when SGLang has responded to the last
call; copies may still be queued on the engines' GPUs then. Several engines are called at the same time.
"""

import asyncio
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from weight_update.case import Case
from weight_update.engine import BenchEngine, BenchEngines
from weight_update.trainer import Trainer


class StockTensors:
    """Sends from each trainer rank to the engine rank on the same GPU. Collective over the trainer ranks.

    Args:
        engines: the engines, on rank 0.
    """

    def __init__(self, trainer: Trainer, engines: BenchEngines, case: Case) -> None:
        self._trainer = trainer
        self._engines = engines
        self._loop = asyncio.new_event_loop()
        self._mesh = init_device_mesh("cpu", (case.num_engines, case.tp_size), mesh_dim_names=("engine", "tp"))
        self._entrance = Entrance(engines, self._mesh)
        if trainer.device.type == "cuda":
            from sglang.srt.utils.patch_torch import monkey_patch_torch_reductions

            monkey_patch_torch_reductions()

    def one_by_one(self, names: Sequence[str], version: str) -> None:
        """Send one call per tensor."""
        self._send([[name] for name in names], version, flattened=False)

    def batched(self, max_bytes: int, version: str) -> None:
        """Send calls with lists of tensors, each tensor shared separately."""
        self._send(self._trainer.batches(max_bytes), version, flattened=False)

    def flattened(self, max_bytes: int, version: str) -> None:
        """Send calls with `FlattenedTensorBucket`s."""
        self._send(self._trainer.batches(max_bytes), version, flattened=True)

    def update_weights(self, max_bytes: int, version: str) -> None:
        """Call SGLang's own `weight_sync.utils.update_weights`. It sets no version, and flushes the cache
        in each call.
        """
        from sglang.srt.weight_sync.utils import update_weights

        for batch in self._trainer.batches(max_bytes):
            named = [(name, self._trainer.full(name)) for name in batch]
            self._loop.run_until_complete(update_weights(self._entrance, named, "tp", self._mesh))  # type: ignore[arg-type]

    def _send(self, runs: Sequence[Sequence[str]], version: str, *, flattened: bool) -> None:
        from sglang.srt.utils import MultiprocessingSerializer

        for index, run in enumerate(runs):
            is_last = index == len(runs) - 1
            named = self._trainer.in_engine_dtype((name, self._trainer.full(name)) for name in run)
            payload = MultiprocessingSerializer.serialize(_flattened(named) if flattened else named)
            payloads: list[Any] = [None] * self._trainer.num_ranks
            dist.gather_object(payload, payloads if self._trainer.rank == 0 else None, dst=0)
            self._load(payloads, "flattened_bucket" if flattened else None, version if is_last else None)

    def _load(self, payloads: list[Any], load_format: str | None, version: str | None) -> None:
        """Call each engine with the payloads of the trainer ranks on its devices; a version also flushes the cache."""

        def load(engine: BenchEngine) -> None:
            part = payloads[engine.trainers]
            engine.load_payloads(part, load_format, flush_cache=version is not None, version=version)

        self._engines.at_once(load)


class Entrance:
    """What SGLang's `update_weights` calls on the first trainer rank of each engine; all engines belong to rank 0."""

    def __init__(self, engines: BenchEngines, mesh: DeviceMesh) -> None:
        self._engines = engines
        self._first_ranks = mesh["engine"].get_group()

    async def update_weights_from_tensor(self, request: Any) -> None:
        """Send the request to rank 0, which passes one to each engine. Collective over the first ranks."""
        requests: list[Any] = [request]
        if (num_engines := dist.get_world_size(self._first_ranks)) > 1:
            requests = [None] * num_engines
            is_first = dist.get_rank() == 0
            dist.gather_object(request, requests if is_first else None, dst=0, group=self._first_ranks)
        await asyncio.to_thread(self._engines.at_once, lambda engine: engine.update(requests[engine.index]))


def _flattened(named: list[tuple[str, Tensor]]) -> dict[str, Any]:
    from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket

    bucket = FlattenedTensorBucket(named_tensors=named)
    return {"flattened_tensor": bucket.get_flattened_tensor(), "metadata": bucket.get_metadata()}
