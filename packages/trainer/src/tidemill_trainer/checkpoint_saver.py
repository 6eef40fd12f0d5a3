"""Checkpoints that the workers write while the run continues."""

from collections.abc import Callable
from types import TracebackType
from typing import Self

from tidemill_dispatch import CallTimeoutError, WorkerDiedError, WorkerError

from tidemill_trainer.checkpoints import Checkpoints
from tidemill_trainer.stalls.report import StallError
from tidemill_trainer.waits import Waits


class CheckpointSaver:
    """Saves checkpoints, one at a time.

    On exit it waits for the last one, also after an error; but not after Ctrl-C, or if workers may never answer. What
    they have written is then removed at the next save.

    Args:
        checkpoints: the checkpoints of the run.
        is_written: returns whether all workers have written their files; with the argument True it waits until then.
        waits: the waits of the driver.
    """

    def __init__(self, checkpoints: Checkpoints, is_written: Callable[[bool], bool], waits: Waits) -> None:
        self._checkpoints = checkpoints
        self._is_written = is_written
        self._waits = waits
        self._pending: int | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None or _answer(error):
            self.commit(waits=True)

    def save(self, step: int, write: Callable[[str], None]) -> None:
        """Wait for the previous checkpoint, and start to save that of `step`; see `Checkpoints.prepare`."""
        self.commit(waits=True)
        self._checkpoints.prepare(step, write)
        self._pending = step

    def commit(self, *, waits: bool = False) -> None:
        """Commit the checkpoint that is being saved, if there is one and it is written or `waits`.

        Raises:
            CheckpointError: a worker could not write it; earlier checkpoints are unchanged.
        """
        step, self._pending = self._pending, None  # one that fails is not committed on exit
        if step is None:
            return
        with self._waits("save_checkpoint"), self._checkpoints.removed_on_error(step):
            is_written = self._is_written(waits)
        if is_written:
            self._checkpoints.commit(step)
        else:
            self._pending = step


def _answer(error: BaseException) -> bool:
    """Return whether the workers answer a call after this error."""
    if isinstance(error, WorkerError):
        return not error.still_running
    return isinstance(error, Exception) and not isinstance(error, WorkerDiedError | CallTimeoutError | StallError)
