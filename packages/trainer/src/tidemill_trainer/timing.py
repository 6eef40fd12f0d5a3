"""The time of the phases of a step."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from tidemill_trainer.waits import Waits


class Seconds:
    """Accumulates wall time by name."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start

    def take(self) -> dict[str, float]:
        """Return the seconds since the last call, by name."""
        taken, self.seconds = self.seconds, {}
        return taken


class Timing(Seconds):
    """Accumulates the wall time of each phase of a step, and records that the driver waits for it."""

    def __init__(self, waits: Waits) -> None:
        super().__init__()
        self._waits = waits

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        with super().__call__(phase), self._waits(phase):
            yield

    def metrics(self) -> dict[str, float]:
        return {f"timing_s/{phase}": seconds for phase, seconds in self.seconds.items()}


def is_due(step: int, every: int) -> bool:
    """Return whether something that is done every `every` steps, or never if that is 0, is done at a step."""
    return every > 0 and step % every == 0
