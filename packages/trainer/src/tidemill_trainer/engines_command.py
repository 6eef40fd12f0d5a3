"""The command `tidemill engines`: show, add and remove the engines of a running job."""

from pathlib import Path
from typing import Literal

from tidemill_trainer.progress import Progress
from tidemill_trainer.rollout.engine_requests import EngineRequestError, send
from tidemill_trainer.run_dir import RunDir, is_locked


def engines(path: Path, action: Literal["list", "add", "remove"], argument: str | None) -> int:
    """Send a request to a run, print its answers, and return the exit status.

    Args:
        path: folder of the run.
        action: what to do.
        argument: number of engines, or name of one to remove; None: one engine.
    """
    run, progress = RunDir(path), Progress()
    try:
        count, name = _count_or_name(action, argument)
        if not run.lock.is_file():
            what = "has no run in it" if path.is_dir() else "is not a folder"
            raise EngineRequestError(
                f"expected the folder of a run, got {path}, which {what}; name it as in `tidemill engines runs/NAME`"
            )

        def is_running() -> bool:
            return is_locked(run.lock)

        if not is_running():
            raise EngineRequestError(f"the run {path} is not running; start it, or continue it with --resume")
        for text, status in send(run.engine_requests, action, count=count, name=name, is_running=is_running):
            if status:
                progress.fail(text)
                return status
            progress.console.print(text, highlight=False, markup=False, soft_wrap=True)
    except EngineRequestError as error:
        progress.fail(str(error))
        return 1
    except OSError as error:
        progress.fail(f"the files of the run {path} cannot be used: {error}; use the command as the user of the run")
        return 1
    return 0


def _count_or_name(action: str, argument: str | None) -> tuple[int, str | None]:
    if argument is None:
        return 1, None
    if action == "remove" and not argument.isdecimal():
        return 1, argument
    if action == "list" or not argument.isdecimal() or int(argument) < 1:
        expected = {"list": "nothing after `list`", "add": "a number >= 1 after `add`"}
        text = expected.get(action, "a number >= 1 or the name of an engine after `remove`")
        raise EngineRequestError(f"expected {text}, got {argument!r}")
    return int(argument), None
