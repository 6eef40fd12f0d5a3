"""Atomic checkpoints of a run."""

import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tidemill_dispatch import CallTimeoutError, WorkerDiedError, WorkerError
from tidemill_engines.location import read_json, remove, sizes, write_text

FORMAT = 1
HF_FOLDER = "huggingface"
"""Subfolder of a checkpoint with the policy in Hugging Face format."""
_NAME = re.compile(r"step_(\d{6,})")
_STATE = "trainer.json"
_FILE_ERRORS = ("ValueError", "FileNotFoundError", "OSError")


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written or read; the message names it and the newest complete one."""


def is_complete(path: str) -> bool:
    """Return whether the checkpoint at a path or URL is complete."""
    return _STATE in sizes(path)


class Checkpoints:
    """The checkpoints in `folder`, one subfolder `step_000123` per checkpoint.

    A checkpoint is complete when it has the file `trainer.json`. It is written last and removed first, so a process
    that is killed leaves no incomplete checkpoint with it.

    Args:
        folder: folder of all checkpoints, or its fsspec URL.
        max_to_keep: number of checkpoints to keep; older ones are removed.
    """

    def __init__(self, folder: str | Path, max_to_keep: int) -> None:
        self._folder = str(folder)
        self._max_to_keep = max_to_keep

    def steps(self) -> list[int]:
        """Return the steps of all complete checkpoints, ascending.

        Raises:
            CheckpointError: they cannot be listed.
        """
        try:
            return [step for step in self._all_steps() if is_complete(self.path(step))]
        except OSError as error:
            raise CheckpointError(f"cannot list the checkpoints in {self._folder}: {error}") from error

    def path(self, step: int) -> str:
        """Return the folder of a checkpoint, or its URL."""
        return f"{self._folder}/step_{step:06d}"

    def save(self, step: int, write: Callable[[str], None]) -> str:
        """Write the checkpoint of `step`: `prepare`, then `commit`."""
        self.prepare(step, write)
        return self.commit(step)

    def prepare(self, step: int, write: Callable[[str], None]) -> None:
        """Write the files of the checkpoint of `step`, which `commit(step)` completes.

        Args:
            step: step of the checkpoint. An older checkpoint of this step is removed.
            write: function that writes the files to the folder or URL it receives.

        Raises:
            CheckpointError: writing failed; the partial checkpoint is removed, and earlier ones are unchanged.
        """
        with self.removed_on_error(step):
            complete = self.steps()
            for other in self._all_steps():
                if other == step or other not in complete:  # of a run that was killed while saving
                    self._remove(other)
            write(self.path(step))

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
            with suppress(OSError):  # which may be the error itself
                self._remove(step)
            raise CheckpointError(f"cannot save {self.path(step)}: {_first_line(error)}; {self._newest()}") from error

    def commit(self, step: int) -> str:
        """Complete the prepared checkpoint and remove older ones beyond `max_to_keep`; return its folder or URL.

        Raises:
            CheckpointError: its last file cannot be written, and earlier checkpoints are unchanged; or an older one
                cannot be removed.
        """
        with self.removed_on_error(step):
            write_text(f"{self.path(step)}/{_STATE}", json.dumps({"format": FORMAT, "step": step}))
        for old in self.steps()[: -self._max_to_keep]:
            try:
                self._remove(old)
            except OSError as error:
                raise CheckpointError(f"saved {self.path(step)}, but {error}") from error
        return self.path(step)

    def read_step(self, path: str) -> int:
        """Return the step of the checkpoint at `path`.

        Raises:
            CheckpointError: its file cannot be read, or it has another format version.
        """
        with self.loading(path):
            state = read_json(f"{path}/{_STATE}")
        if state.get("format") != FORMAT:
            raise CheckpointError(
                f"the checkpoint {path} must have format {FORMAT}, got {state.get('format')}; resume it with the "
                "version of tidemill-trainer that saved it"
            )
        return state["step"]

    @contextmanager
    def loading(self, path: str) -> Iterator[None]:
        """Raise CheckpointError from the error of a file of the checkpoint at `path`, here or in a worker."""
        try:
            yield
        except CallTimeoutError:  # an OSError, but no fault of the checkpoint
            raise
        except (OSError, ValueError, WorkerError) as error:
            if isinstance(error, WorkerError) and error.error_type not in _FILE_ERRORS:
                raise
            message = error.error_message if isinstance(error, WorkerError) else error
            raise CheckpointError(
                f"cannot load the checkpoint {path}: {message}; {self._newest(path)}; if this one is damaged, remove "
                "its folder to resume without it"
            ) from error

    def _all_steps(self) -> list[int]:
        """Return the steps of all checkpoints, also of incomplete ones, ascending."""
        matches = (_NAME.fullmatch(name) for name in sizes(self._folder))
        return sorted(int(match[1]) for match in matches if match)

    def _remove(self, step: int) -> None:
        remove(self.path(step), first=_STATE)

    def _newest(self, other_than: str | None = None) -> str:
        try:
            paths = [path for path in map(self.path, self.steps()) if path != other_than]
        except CheckpointError as error:
            return str(error)
        return f"the newest complete checkpoint is {paths[-1]}" if paths else "there is no other checkpoint"


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
