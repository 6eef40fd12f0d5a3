"""Checkpoints of a run: written whole or not at all."""

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

FORMAT = 1
_NAME = re.compile(r"step_(\d{6,})")
_STATE = "trainer.json"


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or read; the text names it, and the newest whole one."""


class Checkpoints:
    """The folder `folder` with one subfolder `step_000123` for each checkpoint.

    A checkpoint is written to a hidden folder beside them and renamed when it is whole, so a folder with a step's name
    is always whole, whatever happened while another was written.
    """

    def __init__(self, folder: Path, max_to_keep: int) -> None:
        self._folder = folder
        self._max_to_keep = max_to_keep

    def steps(self) -> list[int]:
        """The steps of all whole checkpoints, ascending."""
        if not self._folder.is_dir():
            return []
        matches = (_NAME.fullmatch(path.name) for path in self._folder.iterdir())
        return sorted(int(match[1]) for match in matches if match)

    def path(self, step: int) -> Path:
        return self._folder / f"step_{step:06d}"

    def save(self, step: int, write: Callable[[Path], None]) -> Path:
        """Makes the checkpoint of `step` at once: `prepare`, then `commit`."""
        self.prepare(step, write)
        return self.commit(step)

    def prepare(self, step: int, write: Callable[[Path], None]) -> None:
        """Writes the checkpoint of `step`, which does not count before `commit(step)`: `write(folder)` fills it.

        Raises:
            CheckpointError: writing failed; nothing of it is left, and earlier checkpoints are as they were.
        """
        partial = self._partial(step)
        for left in self._folder.glob(".partial-*"):  # of a run that was stopped while it saved
            shutil.rmtree(left)
        try:
            partial.mkdir(parents=True)
            write(partial)
            with (partial / _STATE).open("w") as state:
                json.dump({"format": FORMAT, "step": step}, state)
                state.flush()
                os.fsync(state.fileno())
        except Exception as error:
            shutil.rmtree(partial, ignore_errors=True)
            raise CheckpointError(f"saving {self.path(step)} failed: {_first_line(error)}; {self._newest()}") from error

    def commit(self, step: int) -> Path:
        """Gives the prepared checkpoint its name and removes older ones beyond `max_to_keep`; returns its folder.

        Raises:
            CheckpointError: the folder cannot be renamed; earlier checkpoints are as they were.
        """
        target = self.path(step)
        try:
            self._discard(target)
            self._partial(step).rename(target)
        except OSError as error:
            raise CheckpointError(f"saving {target} failed: {_first_line(error)}; {self._newest()}") from error
        for old in self.steps()[: -self._max_to_keep]:
            self._discard(self.path(old))
        return target

    def read_step(self, path: Path) -> int:
        """The step of the checkpoint at `path`.

        Raises:
            CheckpointError: it is damaged or of another format version.
        """
        try:
            state = json.loads((path / _STATE).read_text())
        except (OSError, ValueError) as error:
            raise CheckpointError(
                f"{path} is not a whole checkpoint ({error}); {self._newest(path)}; remove the damaged folder to go on "
                "without it"
            ) from error
        if state.get("format") != FORMAT:
            raise CheckpointError(f"{path} has checkpoint format {state.get('format')}, this version reads {FORMAT}")
        return state["step"]

    def _partial(self, step: int) -> Path:
        return self._folder / f".partial-{self.path(step).name}"

    def _discard(self, path: Path) -> None:
        """Removes a checkpoint; it loses its name first, so that half of one never has it."""
        if path.exists():
            doomed = path.rename(self._folder / f".partial-old-{path.name}")
            shutil.rmtree(doomed)

    def _newest(self, other_than: Path | None = None) -> str:
        paths = [path for path in map(self.path, self.steps()) if path != other_than]
        return f"the newest whole checkpoint is {paths[-1]}" if paths else "there is no other checkpoint"


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
