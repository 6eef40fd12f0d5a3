"""Saving beside training: one thread that writes one checkpoint at a time."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor


class Saver:
    """Runs a save now or in the background; an error of the latter is raised by the next call, or by `finish`."""

    def __init__(self) -> None:
        self._executor: ThreadPoolExecutor | None = None
        self._pending: Future[None] | None = None

    def run(self, save: Callable[[], None], *, asynchronous: bool) -> None:
        """Finishes the former save, then runs `save`, in the background if `asynchronous`."""
        self.finish()
        if not asynchronous:
            save()
            return
        if self._executor is None:
            self._executor = ThreadPoolExecutor(1, thread_name_prefix="tidemill-checkpoint")
        self._pending = self._executor.submit(save)

    def finish(self) -> None:
        """Waits for the save in the background; raises what it raised."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def close(self) -> None:
        """Finishes and ends the thread."""
        try:
            self.finish()
        finally:
            executor, self._executor = self._executor, None
            if executor is not None:
                executor.shutdown()
