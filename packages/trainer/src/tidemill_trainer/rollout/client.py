"""An engine in a Ray actor, as the weight updater sees it."""

from typing import Any

import ray
from tidemill_weight_update import BucketHandle


class RayEngine:
    """The `EngineClient` of a `RolloutWorker`, used from the trainer's ranks.

    Args:
        actor: handle of the worker's actor.
        tp_size: devices of its engine.
        timeout_s: deadline of each call.
    """

    def __init__(self, actor: Any, *, tp_size: int, timeout_s: float) -> None:
        self._actor = actor
        self._timeout_s = timeout_s
        self.tp_size = tp_size

    def __repr__(self) -> str:
        return f"RayEngine({self._actor!r})"

    def load_bucket(self, bucket: BucketHandle) -> None:
        ray.get(self._actor.load_bucket.remote(bucket), timeout=self._timeout_s)

    def flush_cache(self) -> None:
        ray.get(self._actor.flush_cache.remote(), timeout=self._timeout_s)

    def get_weight_version(self) -> str:
        return ray.get(self._actor.get_weight_version.remote(), timeout=self._timeout_s)
