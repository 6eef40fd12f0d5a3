"""Atomic checkpoints of a run."""

import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tidemill_dispatch import CallTimeoutError, WorkerDiedError

FORMAT = 1
HF_FOLDER = "huggingface"
"""Subfolder of a checkpoint with the policy in Hugging Face format."""
_NAME = re.compile(r"step_(\d{6,})")
_STATE = "trainer.json"


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written or read; the message names it and the newest complete one."""


class Checkpoints:
    """The checkpoints in `folder`, one subfolder `step_000123` per checkpoint.

    A checkpoint is written to a hidden folder and renamed when it is complete. A folder with the name of a step is
    therefore always complete, even if the process is killed.

    Args:
        folder: folder of all checkpoints.
        max_to_keep: number of checkpoints to keep; older ones are removed.
    """

    def __init__(self, folder: Path, max_to_keep: int) -> None:
        self._folder = folder
        self._max_to_keep = max_to_keep

    def steps(self) -> list[int]:
        """Return the steps of all complete checkpoints, ascending."""
        if not self._folder.is_dir():
            return []
        matches = (_NAME.fullmatch(path.name) for path in self._folder.iterdir())
        return sorted(int(match[1]) for match in matches if match)

    def path(self, step: int) -> Path:
        return self._folder / f"step_{step:06d}"

    def save(self, step: int, write: Callable[[Path], None]) -> Path:
        """Write the checkpoint of `step`: `prepare`, then `commit`."""
        self.prepare(step, write)
        return self.commit(step)

    def prepare(self, step: int, write: Callable[[Path], None]) -> None:
        """Write the checkpoint of `step` to a hidden folder, which `commit(step)` completes.

        Args:
            step: step of the checkpoint.
            write: function that writes the files to the folder it receives.

        Raises:
            CheckpointError: writing failed; the partial checkpoint is removed, and earlier ones are unchanged.
        """
        partial = self._partial(step)
        for leftover in self._folder.glob(".partial-*"):  # of a run that was killed while saving
            shutil.rmtree(leftover)
        with self.removed_on_error(step):
            partial.mkdir(parents=True)
            write(partial)
            with (partial / _STATE).open("w") as state:
                json.dump({"format": FORMAT, "step": step}, state)
                state.flush()
                os.fsync(state.fileno())

    @contextmanager
    def removed_on_error(self, step: int) -> Iterator[None]:
        """Remove the prepared checkpoint of `step` if the block raises an error, which becomes a CheckpointError.

        Errors of workers that died or do not answer pass: they are no fault of the checkpoint.
        """
        try:
            yield
        except (CallTimeoutError, WorkerDiedError):
            raise  # a worker may still write; the next save removes its files
        except Exception as error:
            shutil.rmtree(self._partial(step), ignore_errors=True)
            raise CheckpointError(f"cannot save {self.path(step)}: {_first_line(error)}; {self._newest()}") from error

    def commit(self, step: int) -> Path:
        """Rename the prepared checkpoint and remove older ones beyond `max_to_keep`; return its folder.

        Raises:
            CheckpointError: the folder cannot be renamed; earlier checkpoints are unchanged.
        """
        target = self.path(step)
        try:
            self._discard(target)
            self._partial(step).rename(target)
        except OSError as error:
            raise CheckpointError(f"cannot save {target}: {_first_line(error)}; {self._newest()}") from error
        for old in self.steps()[: -self._max_to_keep]:
            self._discard(self.path(old))
        return target

    def read_step(self, path: Path) -> int:
        """Return the step of the checkpoint at `path`.

        Raises:
            CheckpointError: the checkpoint is damaged or has another format version.
        """
        try:
            state = json.loads((path / _STATE).read_text())
        except (OSError, ValueError) as error:
            raise CheckpointError(
                f"the checkpoint {path} is damaged ({error}); {self._newest(path)}; remove the damaged folder to "
                "resume without it"
            ) from error
        if state.get("format") != FORMAT:
            raise CheckpointError(
                f"the checkpoint {path} must have format {FORMAT}, got {state.get('format')}; resume it with the "
                "version of tidemill-trainer that saved it"
            )
        return state["step"]

    def _partial(self, step: int) -> Path:
        return self._folder / f".partial-{self.path(step).name}"

    def _discard(self, path: Path) -> None:
        """Remove a checkpoint. It is renamed first, so that a partly removed one does not count as complete."""
        if path.exists():
            shutil.rmtree(path.rename(self._folder / f".partial-old-{path.name}"))

    def _newest(self, other_than: Path | None = None) -> str:
        paths = [path for path in map(self.path, self.steps()) if path != other_than]
        return f"the newest complete checkpoint is {paths[-1]}" if paths else "there is no other checkpoint"


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
