"""A `sglang.Engine` of this process."""

import asyncio
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any, TypeVar

from tidemill_weight_update.handle import BucketHandle
from tidemill_weight_update.sglang.payload import LOAD_FORMAT, stock_payload

if TYPE_CHECKING:
    from sglang.srt.entrypoints.engine import Engine
    from sglang.srt.managers.tokenizer_manager import TokenizerManager

T = TypeVar("T")


class LocalEngine:
    """The client of an engine that lives in this process; call it where the engine may be called.

    Args:
        engine: stock `sglang.Engine`, however it was launched.
        timeout_s: longest wait for one answer of the engine, running requests included.
    """

    def __init__(self, engine: "Engine", *, timeout_s: float = 300.0) -> None:
        self._engine = engine
        self._timeout_s = timeout_s

    def __repr__(self) -> str:
        return f"LocalEngine({self._engine.server_args.model_path}, tp_size={self.tp_size})"

    @property
    def tp_size(self) -> int:
        return self._engine.server_args.tp_size

    @property
    def _manager(self) -> "TokenizerManager":
        manager = self._engine.tokenizer_manager
        if manager is None:
            raise RuntimeError("this process has only workers of the engine; use the engine object of node rank 0")
        return manager

    def load_bucket(self, bucket: BucketHandle) -> None:
        """Loads one bucket through the engine's own `update_weights_from_tensor`.

        Raises:
            RuntimeError: the engine refused, did not answer in time, or the bucket's memory cannot be opened from here.
        """
        from sglang.srt.managers.io_struct import UpdateWeightsFromTensorReqInput

        request = UpdateWeightsFromTensorReqInput(
            serialized_named_tensors=[stock_payload(bucket)] * self.tp_size,
            load_format=LOAD_FORMAT,
            flush_cache=False,
            weight_version=bucket.weight_version,
        )
        success, message = self._wait(self._manager.update_weights_from_tensor(request, None))
        if not success:
            raise RuntimeError(message)

    def flush_cache(self) -> None:
        """Empties the prefix cache.

        Raises:
            RuntimeError: the engine has running or waiting requests, or did not answer in time.
        """
        answer = self._wait(self._manager.flush_cache())
        if not answer.success:
            raise RuntimeError(answer.message or "the engine has running or waiting requests")

    def get_weight_version(self) -> str:
        return self._manager.config_value("weight_version")

    def _wait(self, coroutine: Coroutine[Any, Any, T]) -> T:
        loop = self._engine.loop
        if loop.is_running():
            coroutine.close()
            raise RuntimeError("the engine's event loop is busy: call from where engine.generate() may be called")
        try:
            return loop.run_until_complete(asyncio.wait_for(coroutine, self._timeout_s))
        except TimeoutError as error:
            raise RuntimeError(f"no answer within {self._timeout_s} s") from error
