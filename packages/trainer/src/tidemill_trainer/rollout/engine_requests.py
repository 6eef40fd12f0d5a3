"""Requests of `tidemill engines` to the driver of a run, as files in the folder of the run.

A request is a file that the driver removes when it reads it. Answers are lines of a second file, which the command
creates and removes: where it is gone, nobody waits for them.
"""

import json
import os
import shutil
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Action = Literal["list", "add", "remove"]
_POLL_S = 0.2


class EngineRequestError(Exception):
    """A request that cannot be fulfilled; the run continues without it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineRequest:
    """A request, on the side of the driver.

    Attributes:
        action: "list" shows the engines, "add" and "remove" change them.
        count: number of engines to add or remove.
        name: name of the engine to remove; None: the newest `count` ones.
        answers: file of the answers.
        pending: names of the engines for which it has not been fulfilled.
    """

    action: Action
    count: int
    name: str | None
    answers: Path
    pending: set[str]

    def answer(self, text: str, *, status: int | None = None) -> None:
        """Answer with a line of text; with an exit status, it is the last one."""
        with suppress(OSError):  # nobody waits for it, or the disk is full: the run does not depend on it
            descriptor = os.open(self.answers, os.O_WRONLY | os.O_APPEND)
            with os.fdopen(descriptor, "a") as file:
                file.write(json.dumps({"text": text, "status": status}) + "\n")

    def settle(self, name: str, text: str, *, failed: bool = False) -> None:
        """Answer that the request has been fulfilled for an engine, or has failed."""
        self.pending.discard(name)
        self.answer(text, status=1 if failed else None if self.pending else 0)


class EngineRequests:
    """The requests to a run, on the side of its driver.

    Args:
        folder: their folder, which exists between `open` and `close`.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def open(self) -> None:
        """Accept requests, without those to an earlier attempt of the run."""
        self.close()
        self._folder.mkdir(parents=True)

    def close(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)  # a command may write to it at the same time

    def receive(self) -> Iterator[EngineRequest]:
        """Yield new requests."""
        for path in sorted(self._folder.glob("*.request")):
            try:
                content = json.loads(path.read_text())
                path.unlink()
            except FileNotFoundError:  # the command was interrupted
                continue
            yield EngineRequest(**content, answers=path.with_suffix(".answers"), pending=set())


def send(
    folder: Path, action: Action, *, count: int, name: str | None, is_running: Callable[[], bool]
) -> Iterator[tuple[str, int | None]]:
    """Send a request to a run and yield the answers: text, and with the last one the exit status.

    Args:
        folder: folder of the requests.
        action, count, name: as in `EngineRequest`.
        is_running: whether the run still exists.

    Raises:
        EngineRequestError: the run has no engines, or ended before it answered.
    """
    if not folder.is_dir():
        raise EngineRequestError("the run has no engines, or has not started them; try again when it shows its steps")
    answers = folder / f"{uuid.uuid4().hex}.answers"
    answers.touch()
    try:
        partial = answers.with_suffix(".partial")
        partial.write_text(json.dumps({"action": action, "count": count, "name": name}))
        partial.rename(answers.with_suffix(".request"))
        position = 0
        while True:
            runs = is_running()  # before the last look at the file
            lines = b""
            if answers.exists():
                lines = answers.read_bytes()[position:]
            else:
                runs = False  # the run has removed it, because it ends or starts again
            complete = lines[: lines.rfind(b"\n") + 1]
            position += len(complete)
            for line in complete.splitlines():
                answer = json.loads(line)
                yield answer["text"], answer["status"]
                if answer["status"] is not None:
                    return
            if not runs:
                raise EngineRequestError(
                    "the run ended or started again before the request was fulfilled; if it failed, --resume continues "
                    "it with rollout.num_engines engines"
                )
            time.sleep(_POLL_S)
    finally:
        answers.unlink(missing_ok=True)
        answers.with_suffix(".request").unlink(missing_ok=True)
