"""The result of an update, and its wall time by stage."""

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True, slots=True)
class UpdateStats:
    """One update as this rank saw it. Values that end in `_s` are seconds of wall time.

    Attributes:
        seconds: time from the call of `update` to its return, including the wait for other ranks.
        num_bytes: bytes this rank sent (after the cast), without alignment; on the stock path, bytes of all tensors.
        num_tensors: number of tensors this rank sent a part of; on the stock path, number of all tensors.
        num_buckets: number of buckets that carried `num_bytes`.
        verified: whether all engines compared the checksums of what was sent with the checksums of what they read while
            they copied it into their parameters. The parameters are not read again after the copy.
        num_unverified: number of tensors that the checksums do not cover: tensors spread unevenly over the ranks of an
            engine, and tensors in `through_loader`, which other code writes.
        through_loader: name -> reason, for tensors that engines loaded with SGLang's own loader. A long list is
            truncated to 200 names per engine rank; `num_unverified` counts all of them.
        quarantined: name of each engine that failed -> error. Later updates exclude it until `WeightUpdater.readmit`.
        excluded: name -> error of each engine that was left out because it failed earlier, also in an update that
            raised or was interrupted. It is paused, unless it has the old weights or its error says that pausing it
            failed: such an engine may serve old and new weights.
        prepare_s: time to describe the tensors to the engines.
        gather_s: time to gather DTensors into full tensors; stock path only.
        fill_s: time to copy (and cast) into shared memory and to compute the checksums of what is sent.
        load_s: time spent waiting for engines.
        finish_s: time to set the version; on the stock path also to flush the prefix caches.
        engine_s: seconds by stage of the slowest engine rank, within `load_s`: "wait" for the trainer, read its
            "declaration", "plan" the copies and map the memory that they read, "check" the plan, "copy", "finish"
            (tensors derived from weights), "verify".
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
    excluded: dict[str, str] = field(default_factory=dict)

    @property
    def gb_per_s(self) -> float:
        """Return num_bytes / seconds, in 1e9 bytes per second."""
        return self.num_bytes / self.seconds / 1e9


class Stages:
    """Accumulates wall time by stage name, and in total since it was created."""

    def __init__(self) -> None:
        self._started = time.perf_counter()
        self.seconds: defaultdict[str, float] = defaultdict(float)

    @contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        started = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[stage] += time.perf_counter() - started

    def total_s(self) -> float:
        return time.perf_counter() - self._started
