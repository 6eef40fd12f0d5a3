"""The client of a `sglang.Engine` in this process."""

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from tidemill_weight_update.client import PauseMode
from tidemill_weight_update.control.descriptor import Request
from tidemill_weight_update.lora import LoraConfig
from tidemill_weight_update.memory import BucketHandle
from tidemill_weight_update.sglang.payload import (
    DRAIN_S,
    FLUSH_WAIT_FRACTION,
    LOAD_FORMAT,
    LOADER,
    has_loader,
    request_payload,
    stock_payload,
)

if TYPE_CHECKING:
    from sglang.srt.entrypoints.engine import Engine
    from sglang.srt.managers.io_struct import LoRAUpdateOutput, UpdateWeightsFromTensorReqInput
    from sglang.srt.managers.tokenizer_manager import TokenizerManager

T = TypeVar("T")


class LocalEngine:
    """Client of an engine in this process.

    Call it from the thread in which the engine may be called, or, if the engine's event loop runs in a thread, from any
    other thread.

    Args:
        engine: stock `sglang.Engine`, with any launch arguments.
        timeout_s: longest wait for one response of the engine, including running requests.

    Raises:
        TypeError: `engine` is a string.
    """

    def __init__(self, engine: "Engine", *, timeout_s: float = 300.0) -> None:
        if isinstance(engine, str):
            raise TypeError(
                f"engine must be an sglang.Engine, got {engine!r}; start one with sglang.Engine(model_path=...), or "
                "use HttpEngine(url) for a server"
            )
        self._engine = engine
        self._timeout_s = timeout_s
        self._tasks: set[asyncio.Task[Any]] = set()  # the event loop alone keeps weak references

    def __repr__(self) -> str:
        return f"LocalEngine({self._engine.server_args.model_path}, tp_size={self.tp_size})"

    @property
    def tp_size(self) -> int:
        return self._engine.server_args.tp_size

    @property
    def _manager(self) -> "TokenizerManager":
        manager = self._engine.tokenizer_manager
        if manager is None:
            raise RuntimeError("this process hosts only workers of the engine; use the engine object of node rank 0")
        return manager

    @property
    def has_loader(self) -> bool:
        """Whether the engine has the tidemill loader. ValueError for an engine with replicas or pipeline stages."""
        return has_loader(vars(self._engine.server_args))

    def load(self, request: Request, *, flush_cache: bool) -> None:
        """Pass `request` to all ranks, in one call of the engine's `update_weights_from_tensor`."""
        load = self._load_request(request_payload(request), LOADER)
        self._wait(self._update_and_flush(load) if flush_cache else self._update(load))

    def load_bucket(self, bucket: BucketHandle) -> None:
        self._wait(self._update(self._load_request(stock_payload(bucket), LOAD_FORMAT)))

    def flush_cache(self) -> None:
        """Empty the prefix cache when no request runs; new requests wait until then.

        Raises:
            RuntimeError: running requests do not finish (those of a paused engine cannot), or the engine did not
                respond in time.
        """
        self._wait(self._flush())

    def get_weight_version(self) -> str:
        return self._manager.config_value("weight_version")

    def pause(self, mode: PauseMode) -> None:
        """Stop generation; new requests wait for `resume`. The engine may be paused already."""
        from sglang.srt.managers.io_struct import ContinueGenerationReqInput, PauseGenerationReqInput

        if mode == "abort":  # SGLang waits until all requests have finished; those of a paused scheduler never do
            self._wait(self._manager._async_dispatch_to_scheduler(ContinueGenerationReqInput()))
        self._wait(self._manager.pause_generation(PauseGenerationReqInput(mode=mode)))

    def resume(self) -> None:
        from sglang.srt.managers.io_struct import ContinueGenerationReqInput

        self._wait(self._manager.continue_generation(ContinueGenerationReqInput()))

    def set_weight_version(self, version: str) -> None:
        self._manager.record_config_updates("tidemill.weight_update", weight_version=version)

    def adapters(self) -> list[str]:
        return list(self._manager.lora_registry.get_all_adapters())

    def load_adapter(self, name: str, config: LoraConfig, bucket: BucketHandle) -> None:
        """Load an adapter through the engine's `load_lora_adapter_from_tensors`."""
        from sglang.srt.managers.io_struct import LoadLoRAAdapterFromTensorsReqInput

        request = LoadLoRAAdapterFromTensorsReqInput(
            lora_name=name,
            config_dict=config.to_sglang(),
            serialized_named_tensors=[stock_payload(bucket)] * self.tp_size,
            load_format=LOAD_FORMAT,
        )
        _check(self._wait(self._manager.load_lora_adapter_from_tensors(request, None)))

    def unload_adapter(self, name: str) -> None:
        """Wait until no request uses the adapter, and remove it; RuntimeError if there is none, or after a timeout."""
        from sglang.srt.managers.io_struct import UnloadLoRAAdapterReqInput

        _check(self._wait(self._manager.unload_lora_adapter(UnloadLoRAAdapterReqInput(lora_name=name), None)))

    async def _update(self, request: "UpdateWeightsFromTensorReqInput") -> None:
        success, message = await self._manager.update_weights_from_tensor(request, None)
        if not success:
            raise RuntimeError(message)

    async def _update_and_flush(self, request: "UpdateWeightsFromTensorReqInput") -> None:
        """Load and empty the prefix cache, with no new request in between.

        The cache is emptied first, while the trainer still prepares: if that succeeds, no request runs that could add
        an entry before the new weights are loaded. Otherwise a request is still running (one whose caller has
        disconnected, which SGLang's lock does not wait for, or the last one, which is not removed yet), and the cache
        is emptied after it finishes. SGLang can do both in one call, but crashes if a request is still running then.
        """
        async with self._without_new_requests() as max_wait_s:
            load = self._manager.update_weights_from_tensor_communicator  # pyright: ignore[reportAttributeAccessIssue]
            flushed, results = await asyncio.gather(self._manager.flush_cache(), load(request))
            failed = [result.message for result in results if not result.success]
            if failed:
                raise RuntimeError("; ".join(failed))
            if not flushed.success:
                await self._flush_within(max_wait_s)

    def _load_request(self, payload: bytes, load_format: str) -> "UpdateWeightsFromTensorReqInput":
        from sglang.srt.managers.io_struct import UpdateWeightsFromTensorReqInput

        return UpdateWeightsFromTensorReqInput(
            serialized_named_tensors=[payload] * self.tp_size,
            load_format=load_format,
            flush_cache=False,
            disable_draft_model=True,
        )

    async def _flush(self) -> None:
        async with self._without_new_requests() as max_wait_s:
            await self._flush_within(max_wait_s)

    async def _flush_within(self, max_wait_s: float) -> None:
        answer = await self._manager.flush_cache(max_wait_s)
        if not answer.success:
            raise RuntimeError(
                f"cannot flush its prefix cache: requests still run after {max_wait_s:g} s; increase timeout_s of the "
                f"client, or use in_flight='abort'"
            )

    @asynccontextmanager
    async def _without_new_requests(self) -> AsyncIterator[float]:
        """Make new requests wait until the block ends. Requests with a connected caller have finished, unless the
        engine is paused.

        Yields:
            Number of seconds to wait for other requests.
        """
        manager = self._manager
        async with manager.is_pause_cond:
            is_paused = manager.is_pause
        if is_paused:
            yield DRAIN_S
        else:
            async with manager.model_update_lock.writer_lock:
                yield self._timeout_s * FLUSH_WAIT_FRACTION

    def _wait(self, coroutine: Coroutine[Any, Any, T]) -> T:
        loop = self._engine.loop
        if not loop.is_running():
            return loop.run_until_complete(self._within_timeout(coroutine))
        if _is_running_here(loop):
            coroutine.close()
            raise RuntimeError(
                "the engine's event loop is running in this thread: call from another thread, or from a context in "
                "which engine.generate() may be called"
            )
        return asyncio.run_coroutine_threadsafe(self._within_timeout(coroutine), loop).result()

    async def _within_timeout(self, coroutine: Coroutine[Any, Any, T]) -> T:
        # Not cancelled after a timeout: SGLang would return its late response to the next call.
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        done, _ = await asyncio.wait([task], timeout=self._timeout_s)
        if not done:
            raise RuntimeError(f"no response within {self._timeout_s} s (timeout_s of LocalEngine)")
        return task.result()


def _is_running_here(loop: asyncio.AbstractEventLoop) -> bool:
    try:
        return asyncio.get_running_loop() is loop
    except RuntimeError:  # no loop runs in this thread
        return False


def _check(answer: "LoRAUpdateOutput") -> None:
    if not answer.success:
        raise RuntimeError(answer.error_message)
