"""A stock SGLang engine for the benchmark."""

import asyncio
import json
import pickle
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TypeVar

import torch
from tidemill_weight_update.fp8 import fp8_launch_args
from tidemill_weight_update.sglang import sglang_launch_args

from weight_update import probe
from weight_update.case import Case

CALL_TIMEOUT_S = 100.0

T = TypeVar("T")

_GPU_ARGS: dict[str, Any] = {
    "attention_backend": "triton",
    "moe_runner_backend": "triton",
    "fp8_gemm_runner_backend": "triton",
    "mem_fraction_static": 0.5,
    # Not needed for updates and may fail to start; FlashInfer's fusion would also use NVLink multicast.
    "disable_custom_all_reduce": True,
    "enforce_disable_flashinfer_allreduce_fusion": True,
}


class BenchEngine:
    """An engine of the current process; SGLang's responses are checked.

    Args:
        folder: folder for the model's config and the results of the probe.
    """

    def __init__(self, case: Case, folder: str) -> None:
        import sglang

        model = Path(folder, "model")
        model.mkdir()
        (model / "config.json").write_text(json.dumps(case.config))
        self._folder = folder
        self._tp_size = case.tp_size
        self.engine = sglang.Engine(
            model_path=str(model),
            dtype="bfloat16",
            skip_tokenizer_init=True,
            sampling_backend="pytorch",
            disable_cuda_graph=True,
            tp_size=case.tp_size,
            base_gpu_id=case.num_trainers if case.separate and case.is_cuda else 0,
            max_total_tokens=8192 if case.is_cuda else 1024,
            max_running_requests=16,
            log_level="warning",
            **(_GPU_ARGS if case.is_cuda else {"device": "cpu"}),
            **(fp8_launch_args() if case.is_fp8 else {"load_format": "dummy"}),
            **sglang_launch_args([probe.LOADER]),
        )
        self.manager = self.engine.tokenizer_manager

    def wait(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run the coroutine on the engine's event loop."""
        return self.engine.loop.run_until_complete(asyncio.wait_for(coroutine, CALL_TIMEOUT_S))

    @property
    def left_over(self) -> str:
        """Path of a file in /dev/shm that SGLang does not remove."""
        return self.manager.load_snapshot_reader.path

    @property
    def weight_version(self) -> str:
        return self.manager.config_value("weight_version")

    def load_payloads(
        self, payloads: list[bytes], load_format: str | None, *, flush_cache: bool = False, version: str | None = None
    ) -> None:
        """Call stock `update_weights_from_tensor` once; `payloads` has one entry per rank."""
        from sglang.srt.managers.io_struct import UpdateWeightsFromTensorReqInput

        request = UpdateWeightsFromTensorReqInput(
            serialized_named_tensors=payloads,
            load_format=load_format,
            flush_cache=flush_cache,
            weight_version=version,
        )
        self.wait(self.update_weights_from_tensor(request))

    async def update_weights_from_tensor(self, request: Any) -> None:
        """Interface that SGLang's `weight_sync.utils.update_weights` expects of an engine."""
        success, message = await self.manager.update_weights_from_tensor(request, None)
        if not success:
            raise RuntimeError(f"SGLang refused weights: {message}")

    def probe(self, operation: str) -> list[Any]:
        """Run an operation of `probe` in all ranks and return their results."""
        text = json.dumps({"operation": operation, "folder": self._folder})
        self.load_payloads([pickle.dumps([(text, _Empty())])] * self._tp_size, probe.LOADER)
        return [json.loads(Path(self._folder, f"answer{rank}.json").read_text()) for rank in range(self._tp_size)]

    def shut_down(self) -> None:
        self.engine.shutdown()


class _Empty:
    """Unpickles as an empty tensor, without shared memory."""

    def __reduce__(self) -> tuple[Any, ...]:
        return torch.empty, (0,)
