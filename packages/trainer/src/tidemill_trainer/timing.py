"""The time of the phases of a step."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from tidemill_trainer.waits import Waits


class Timing:
    """Accumulates the wall time of each phase of a step, and records that the driver waits for it."""

    def __init__(self, waits: Waits) -> None:
        self._waits = waits
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        start = time.perf_counter()
        with self._waits(phase):
            yield
        self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - start

    def metrics(self) -> dict[str, float]:
        return {f"timing_s/{phase}": seconds for phase, seconds in self.seconds.items()}


def is_due(step: int, every: int) -> bool:
    """Return whether something that is done every `every` steps, or never if that is 0, is done at a step."""
    return every > 0 and step % every == 0
