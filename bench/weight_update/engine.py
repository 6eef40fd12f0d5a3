"""Stock SGLang engines for the benchmark."""

import asyncio
import json
import pickle
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from tidemill_weight_update.fp8 import fp8_launch_args
from tidemill_weight_update.sglang import sglang_launch_args

from weight_update import probe
from weight_update.case import Case

if TYPE_CHECKING:
    from sglang.srt.managers.io_struct import UpdateWeightsFromTensorReqInput

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
        folder: folder for the model's config and the results of the probe; created here.
        index: number of the engine, which determines its devices.

    Attributes:
        index: number of the engine.
        trainers: trainer ranks on the devices of its ranks, unless the engine has its own.
    """

    def __init__(self, case: Case, folder: Path, index: int) -> None:
        import sglang

        model = folder / "model"
        model.mkdir(parents=True)
        (model / "config.json").write_text(json.dumps(case.config))
        self._folder = folder
        self._tp_size = case.tp_size
        self.index = index
        self.trainers = slice(index * case.tp_size, (index + 1) * case.tp_size)
        self.engine = sglang.Engine(
            model_path=str(model),
            dtype="bfloat16",
            skip_tokenizer_init=True,
            sampling_backend="pytorch",
            disable_cuda_graph=True,
            tp_size=case.tp_size,
            base_gpu_id=case.num_trainers if case.separate and case.is_cuda else self.trainers.start,
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
        self.update(request)

    def update(self, request: "UpdateWeightsFromTensorReqInput") -> None:
        """Call stock `update_weights_from_tensor`."""
        success, message = self.wait(self.manager.update_weights_from_tensor(request, None))
        if not success:
            raise RuntimeError(f"SGLang refused weights: {message}")

    def probe(self, operation: str) -> list[Any]:
        """Run an operation of `probe` in all ranks and return their results."""
        text = json.dumps({"operation": operation, "folder": str(self._folder)})
        self.load_payloads([pickle.dumps([(text, _Empty())])] * self._tp_size, probe.LOADER)
        return [json.loads((self._folder / f"answer{rank}.json").read_text()) for rank in range(self._tp_size)]


class BenchEngines:
    """The engines of a case, all of the current process; empty on trainer ranks other than 0."""

    def __init__(self, engines: Sequence[BenchEngine]) -> None:
        self._engines = engines
        self._threads = ThreadPoolExecutor(max(1, len(engines)))

    def __iter__(self) -> Iterator[BenchEngine]:
        return iter(self._engines)

    def __len__(self) -> int:
        return len(self._engines)

    def at_once(self, action: Callable[[BenchEngine], T]) -> list[T]:
        """Call `action(engine)` for all engines at the same time and return the results."""
        if len(self._engines) == 1:
            return [action(self._engines[0])]
        return list(self._threads.map(action, self._engines))

    def probe(self, operation: str) -> list[list[Any]]:
        """Run an operation of `probe` in all ranks of all engines; return the results by engine and rank."""
        return self.at_once(lambda engine: engine.probe(operation))

    def shut_down(self) -> None:
        for engine in self._engines:  # the first shutdown kills the processes of all engines
            engine.manager._subprocess_watchdog.stop()
        for engine in self._engines:
            engine.engine.shutdown()


class _Empty:
    """Unpickles as an empty tensor, without shared memory."""

    def __reduce__(self) -> tuple[Any, ...]:
        return torch.empty, (0,)
