"""Timing of updates on all trainer ranks."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from weight_update.trainer import Trainer


@dataclass(frozen=True, kw_only=True, slots=True)
class Timing:
    """Seconds of one method.

    Attributes:
        method: name of the method.
        first: time of the first update, which includes recording, mapping and compilation.
        repeats: times of the following updates.
        share: share of the tensors that was sent; the times are already extrapolated to all of them.
        results: return values of all updates, including the first.
    """

    method: str
    first: float
    repeats: tuple[float, ...]
    share: float = 1.0
    results: tuple[Any, ...] = ()

    @property
    def median(self) -> float:
        return statistics.median(self.repeats)

    @property
    def minimum(self) -> float:
        return min(self.repeats)


def measure(
    trainer: Trainer, method: str, action: Callable[[str], Any], *, repeats: int, max_s: float, share: float = 1.0
) -> Timing:
    """Call `action(version)` once and then `repeats` times, or fewer after `max_s`, but at least twice.

    Collective. The clock runs on rank 0, from when all ranks are ready until the action returns there.
    """
    seconds: list[float] = []
    results = []
    while len(seconds) < 1 + repeats:
        trainer.synchronize()
        started = time.perf_counter()
        results.append(action(f"{method} {len(seconds)}"))
        seconds.append(trainer.agree(time.perf_counter() - started))
        if len(seconds) > 2 and sum(seconds) > max_s:
            break
    seconds = [value / share for value in seconds]
    return Timing(method=method, first=seconds[0], repeats=tuple(seconds[1:]), share=share, results=tuple(results))
