"""Save checkpoints in a background thread, one at a time."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor


class Saver:
    """Run a save now or in the background; `finish` or the next call raises the error of a background save."""

    def __init__(self) -> None:
        self._executor: ThreadPoolExecutor | None = None
        self._pending: Future[None] | None = None

    def run(self, save: Callable[[], None], *, asynchronous: bool) -> None:
        """Wait for the previous save, then run `save`, in the background if `asynchronous`."""
        self.finish()
        if not asynchronous:
            save()
            return
        if self._executor is None:
            self._executor = ThreadPoolExecutor(1, thread_name_prefix="tidemill-checkpoint")
        self._pending = self._executor.submit(save)

    def finish(self) -> None:
        """Wait for the save in the background and raise its error."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def close(self) -> None:
        """Wait for the save in the background and stop the thread."""
        try:
            self.finish()
        finally:
            executor, self._executor = self._executor, None
            if executor is not None:
                executor.shutdown()
