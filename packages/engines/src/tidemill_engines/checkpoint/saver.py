"""Save checkpoints in a background thread, one after the other."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait


class Saver:
    """Run saves in the background, in their order; `finish` and `close` wait for them and raise their first error."""

    def __init__(self) -> None:
        self._executor: ThreadPoolExecutor | None = None
        self._pending: list[Future[None]] = []

    def start(self, save: Callable[[], None]) -> None:
        """Run `save` in the background, after those that were started before."""
        if self._executor is None:
            self._executor = ThreadPoolExecutor(1, thread_name_prefix="tidemill-checkpoint")
        self._pending.append(self._executor.submit(save))

    @property
    def is_saving(self) -> bool:
        """Whether a save in the background runs or waits."""
        return not all(each.done() for each in self._pending)

    def finish(self) -> None:
        """Wait for the saves in the background and raise their first error."""
        pending, self._pending = self._pending, []
        wait(pending)
        for each in pending:
            each.result()

    def close(self) -> None:
        """Wait for the saves in the background and stop the thread."""
        try:
            self.finish()
        finally:
            executor, self._executor = self._executor, None
            if executor is not None:
                executor.shutdown()
