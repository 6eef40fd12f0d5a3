"""The client of an engine in a Ray actor, for the weight updater."""

from functools import cached_property
from typing import Any

import ray
from tidemill_weight_update import BucketHandle, PauseMode, Request


class RayEngine:
    """The `EngineClient` of a `RolloutWorker`, used by the training workers.

    Args:
        actor: handle of the worker's actor.
        name: name of the worker, for messages.
        tp_size: number of devices of its engine.
        timeout_s: timeout of each call.
    """

    def __init__(self, actor: Any, name: str, *, tp_size: int, timeout_s: float) -> None:
        self._actor = actor
        self._name = name
        self._timeout_s = timeout_s
        self.tp_size = tp_size

    def __repr__(self) -> str:
        return self._name

    @cached_property
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

    def _call(self, method: str, *args: object, **kwargs: object) -> Any:
        return ray.get(getattr(self._actor, method).remote(*args, **kwargs), timeout=self._timeout_s)
