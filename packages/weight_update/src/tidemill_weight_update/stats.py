"""What an update reports."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class UpdateStats:
    """One update, as this rank saw it. `_s` are seconds of wall time.

    Attributes:
        seconds: from the call of `update` to its return; includes waiting for other ranks.
        num_bytes: bytes of the tensors as sent (after a cast), without alignment.
        gather_s: making full tensors of DTensors.
        copy_s: copying (and casting) into the arena; 0 on ranks without one.
        load_s: the engines' `load_bucket` calls; 0 on ranks that talk to no engine.
        flush_s: flushing the prefix caches and asking the engines for their version.
    """

    seconds: float
    num_bytes: int
    num_tensors: int
    num_buckets: int
    weight_version: str
    gather_s: float
    copy_s: float
    load_s: float
    flush_s: float

    @property
    def gb_per_s(self) -> float:
        """num_bytes / seconds, in 1e9 bytes per second."""
        return self.num_bytes / self.seconds / 1e9
