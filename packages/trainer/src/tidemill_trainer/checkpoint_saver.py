"""Checkpoints that the workers write while the run continues."""

from collections.abc import Callable
from types import TracebackType
from typing import Self

from tidemill_dispatch import CallTimeoutError, WorkerDiedError, WorkerError

from tidemill_trainer.checkpoints import CheckpointError, Checkpoints
from tidemill_trainer.stalls.report import StallError
from tidemill_trainer.waits import Waits


class CheckpointSaver:
    """Saves checkpoints, one at a time.

    The caller calls `commit` for the first time when the metrics of the checkpoint's step are written, so that those
    of every checkpoint are.

    On exit it waits for the last one, also after an error or Ctrl-C; but not after another Ctrl-C, before its first
    `commit`, or if workers may never answer. What they have written is then removed at the next save.

    Args:
        checkpoints: the checkpoints of the run.
        is_written: returns whether all workers have written their files; with the argument True it waits until then.
        waits: the waits of the driver.
        report: shows a message to the user.
    """

    def __init__(
        self,
        checkpoints: Checkpoints,
        is_written: Callable[[bool], bool],
        waits: Waits,
        report: Callable[[str], None],
    ) -> None:
        self._checkpoints = checkpoints
        self._is_written = is_written
        self._waits = waits
        self._report = report
        self._pending: int | None = None
        self._may_commit = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and not self._may_commit:
            return
        if isinstance(error, KeyboardInterrupt):
            self._commit_after_ctrl_c()
        elif error is None or _answer(error):
            self.commit(waits=True)

    def save(self, step: int, write: Callable[[str], None]) -> None:
        """Wait for the previous checkpoint, and start to save that of `step`; see `Checkpoints.prepare`."""
        self.commit(waits=True)
        self._checkpoints.prepare(step, write)
        self._pending, self._may_commit = step, False

    def commit(self, *, waits: bool = False) -> None:
        """Commit the checkpoint that is being saved, if there is one and it is written or `waits`.

        Raises:
            CheckpointError: a worker could not write it; earlier checkpoints are unchanged.
        """
        self._may_commit = True
        step = self._pending
        if step is None:
            return
        try:
            with self._waits("save_checkpoint"), self._checkpoints.removed_on_error(step):
                if not self._is_written(waits):
                    return
            self._checkpoints.commit(step)
        except Exception:
            self._pending = None  # one that fails is not committed on exit
            raise
        self._pending = None

    def _commit_after_ctrl_c(self) -> None:
        """Commit the checkpoint that is being saved, or report why it cannot be: the run has been stopped anyway."""
        step = self._pending
        if step is None:
            return
        self._report(f"waiting for the checkpoint of step {step}; Ctrl-C again to stop without it")
        try:
            self.commit(waits=True)
        except (CheckpointError, WorkerDiedError, CallTimeoutError) as error:
            self._report(f"the checkpoint of step {step} is not complete: {error}")


def _answer(error: BaseException) -> bool:
    """Return whether the workers answer a call after this error."""
    if isinstance(error, WorkerError):
        return not error.still_running
    return isinstance(error, Exception) and not isinstance(error, WorkerDiedError | CallTimeoutError | StallError)
