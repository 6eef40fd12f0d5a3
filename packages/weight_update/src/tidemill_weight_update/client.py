"""What the updater needs from an engine."""

from typing import Protocol

from tidemill_weight_update.handle import BucketHandle


class EngineClient(Protocol):
    """An engine as the updater sees it. Its `repr` names it in error messages.

    Every method raises on failure (any exception) and returns within a deadline of its own.
    """

    @property
    def tp_size(self) -> int:
        """Number of tensor-parallel ranks of the engine."""
        ...

    def load_bucket(self, bucket: BucketHandle) -> None:
        """Loads all tensors of `bucket` on all ranks of the engine, and stamps `bucket.weight_version` if it is set.

        After it returns, no rank reads host memory of the bucket any more. GPU memory may still be read by copies that
        were queued on the device: each call waits, on every rank of the engine, for the copies of the call before it.
        """
        ...

    def flush_cache(self) -> None:
        """Empties the prefix cache; raises if the engine could not, for example because of running requests."""
        ...

    def get_weight_version(self) -> str:
        """The version that the engine reports with its outputs."""
        ...
