"""Stock SGLang for an engine on the trainer's GPUs: the variants of `update_weights_from_tensor`.

Each method sends all tensors and flushes the prefix cache once. Its clock stops when SGLang has responded to the last
call; copies may still be queued on the engine's GPUs then.
"""

import asyncio
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from weight_update.engine import BenchEngine
from weight_update.trainer import Trainer


class StockTensors:
    """Sends from trainer rank i to engine rank i, which is on the same GPU. Collective over the trainer ranks.

    Args:
        engine: the engine, on rank 0.
    """

    def __init__(self, trainer: Trainer, engine: BenchEngine | None) -> None:
        self._trainer = trainer
        self._engine = engine
        self._loop = asyncio.new_event_loop() if engine is None else engine.engine.loop
        self._mesh = init_device_mesh("cpu", (trainer.num_ranks,), mesh_dim_names=("tp",))
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
            self._loop.run_until_complete(update_weights(self._engine, named, "tp", self._mesh))  # type: ignore[arg-type]

    def _send(self, runs: Sequence[Sequence[str]], version: str, *, flattened: bool) -> None:
        from sglang.srt.utils import MultiprocessingSerializer

        for index, run in enumerate(runs):
            is_last = index == len(runs) - 1
            named = self._trainer.in_engine_dtype((name, self._trainer.full(name)) for name in run)
            payload = MultiprocessingSerializer.serialize(_flattened(named) if flattened else named)
            payloads: list[Any] = [None] * self._trainer.num_ranks
            dist.gather_object(payload, payloads if self._trainer.rank == 0 else None, dst=0)
            if self._engine is not None:
                self._engine.load_payloads(
                    payloads,
                    "flattened_bucket" if flattened else None,
                    flush_cache=is_last,
                    version=version if is_last else None,
                )


def _flattened(named: list[tuple[str, Tensor]]) -> dict[str, Any]:
    from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket

    bucket = FlattenedTensorBucket(named_tensors=named)
    return {"flattened_tensor": bucket.get_flattened_tensor(), "metadata": bucket.get_metadata()}
