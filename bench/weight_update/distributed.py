"""Stock SGLang for an engine on other GPUs: `update_weights_from_distributed`."""

import asyncio
import socket
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from weight_update.engine import BenchEngine, BenchEngines
from weight_update.trainer import Trainer

_GROUP = "weight_update_bench"
_HOST = "127.0.0.1"


class StockDistributed:
    """Broadcasts full tensors from trainer rank 0 to all engine ranks; the other trainer ranks take part in the
    gathering.

    Collective over the trainer ranks.

    Args:
        engines: the engine, on rank 0.
    """

    def __init__(self, trainer: Trainer, engines: BenchEngines, tp_size: int) -> None:
        self._trainer = trainer
        self._engine = engine = next(iter(engines), None)
        self._group: Any = None
        if engine is not None:
            self._group = self._join(engine, tp_size)

    def one_by_one(self, names: Sequence[str], version: str) -> None:
        """Send one call per tensor."""
        self._send([[name] for name in names], version, flattened=False)

    def batched(self, max_bytes: int, version: str) -> None:
        """Send calls with lists of tensors, one broadcast per tensor."""
        self._send(self._trainer.batches(max_bytes), version, flattened=False)

    def flattened(self, max_bytes: int, version: str) -> None:
        """Send calls with `flattened_bucket`, one broadcast per call."""
        self._send(self._trainer.batches(max_bytes), version, flattened=True)

    def close(self) -> None:
        if self._engine is not None:
            self._engine.engine.destroy_weights_update_group(_GROUP)
            dist.destroy_process_group(self._group)

    def _join(self, engine: BenchEngine, tp_size: int) -> Any:
        from sglang.srt.managers.io_struct import InitWeightsUpdateGroupReqInput
        from sglang.srt.utils import init_custom_process_group

        with socket.socket() as probe:
            probe.bind((_HOST, 0))
            port = probe.getsockname()[1]
        backend = "nccl" if self._trainer.device.type == "cuda" else "gloo"
        request = InitWeightsUpdateGroupReqInput(
            master_address=_HOST,
            master_port=port,
            rank_offset=1,
            world_size=1 + tp_size,
            group_name=_GROUP,
            backend=backend,
        )

        def join() -> Any:
            return init_custom_process_group(
                backend=backend,
                init_method=f"tcp://{_HOST}:{port}",
                world_size=1 + tp_size,
                rank=0,
                group_name=_GROUP,
            )

        return self._both(engine, engine.manager.init_weights_update_group(request, None), join)

    def _send(self, runs: Sequence[Sequence[str]], version: str, *, flattened: bool) -> None:
        for index, run in enumerate(runs):
            named = [(name, self._trainer.full(name)) for name in run]
            if self._engine is not None:
                self._broadcast(self._engine, named, version if index == len(runs) - 1 else None, flattened)

    def _broadcast(
        self, engine: BenchEngine, named: list[tuple[str, Tensor]], version: str | None, flattened: bool
    ) -> None:
        from sglang.srt.managers.io_struct import UpdateWeightsFromDistributedReqInput
        from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket

        request = UpdateWeightsFromDistributedReqInput(
            names=[name for name, _ in named],
            dtypes=[str(tensor.dtype).removeprefix("torch.") for _, tensor in named],
            shapes=[list(tensor.shape) for _, tensor in named],
            group_name=_GROUP,
            flush_cache=version is not None,
            weight_version=version,
            load_format="flattened_bucket" if flattened else None,
        )

        def broadcast() -> None:
            tensors = [tensor for _, tensor in named]
            if flattened:
                tensors = [FlattenedTensorBucket(named_tensors=named).get_flattened_tensor()]
            for work in [dist.broadcast(tensor, 0, group=self._group, async_op=True) for tensor in tensors]:
                assert work is not None
                work.wait()

        self._both(engine, engine.manager.update_weights_from_distributed(request, None), broadcast)

    def _both(self, engine: BenchEngine, call: Coroutine[Any, Any, tuple[bool, str]], work: Callable[[], Any]) -> Any:
        """Run `work`, which waits for the engine, while the engine executes `call`, which waits for `work`."""

        def with_device() -> Any:
            if self._trainer.device.type == "cuda":
                torch.cuda.set_device(self._trainer.device)  # the current device is per thread
            return work()

        async def both() -> Any:
            answer = asyncio.ensure_future(call)
            result = await asyncio.get_running_loop().run_in_executor(None, with_device)
            success, message = await answer
            if not success:
                raise RuntimeError(f"SGLang refused weights: {message}")
            return result

        return engine.wait(both())
