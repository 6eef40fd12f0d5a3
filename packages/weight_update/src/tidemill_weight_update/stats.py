"""What an update reports."""

from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True, slots=True)
class UpdateStats:
    """One update, as this rank saw it. `_s` are seconds of wall time.

    Attributes:
        seconds: from the call of `update` to its return; includes waiting for other ranks.
        num_bytes: bytes of what this rank sent (after a cast), without alignment; on the stock path, of all tensors.
            If engines of both paths were updated, what was sent on both.
        num_tensors: tensors of which this rank sent a part; on the stock path, all tensors.
        num_buckets: of which `num_bytes` consist.
        verified: whether all engines compared checksums of what was sent with those of what they read as they copied it
            to their parameters; these are not read again.
        num_unverified: tensors of which that tells nothing: they lie in unequal parts on the ranks of an engine, or are
            in `through_loader`, so that other code put them there.
        through_loader: tensors that engines gave to SGLang's own loader, with the reason. Of thousands it names some
            hundreds, and the last reason tells how many it does not name.
        quarantined: name of an engine that failed -> why. It is paused if it may hold a mix of versions, and left out
            further updates until it is named in `update(engines=...)`, or no other is left.
        prepare_s: describing the tensors to the engines.
        gather_s: making full tensors of DTensors; stock path only.
        fill_s: copying (and casting) into shared memory, and checksums of what is sent.
        load_s: waiting for engines.
        finish_s: making the version visible, on the stock path also flushing the prefix caches.
        engine_s: where the slowest engine rank spent its time, within `load_s`: "wait" for the trainer, "check" plans,
            "copy", "finish" (what the model derives from its weights), "verify".
    """

    seconds: float
    num_bytes: int
    num_tensors: int
    num_buckets: int
    weight_version: str
    verified: bool
    num_unverified: int
    prepare_s: float
    gather_s: float
    fill_s: float
    load_s: float
    finish_s: float
    engine_s: dict[str, float] = field(default_factory=dict)
    through_loader: dict[str, str] = field(default_factory=dict)
    quarantined: dict[str, str] = field(default_factory=dict)

    @property
    def gb_per_s(self) -> float:
        """num_bytes / seconds, in 1e9 bytes per second."""
        return self.num_bytes / self.seconds / 1e9
