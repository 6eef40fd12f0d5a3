"""Log files of worker processes."""

import os
import sys
from pathlib import Path

_MAX_TAIL = 16 * 1024


def redirect_output(log_dir: str, name: str) -> None:
    """Redirect standard output and error of this process and its children to `log_dir`/`name`.log."""
    path = Path(log_dir) / f"{name}.log"
    path.parent.mkdir(parents=True, exist_ok=True)
    sys.stdout.flush()
    sys.stderr.flush()
    target = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(target, 1)
    os.dup2(target, 2)
    os.close(target)


def tail(path: Path, num_lines: int) -> str:
    """Return the last lines of a log file, at most its last 16 KiB; empty if it does not exist."""
    if not path.is_file():
        return ""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - _MAX_TAIL))  # an episode may have written gigabytes
        return "\n".join(file.read(_MAX_TAIL).decode(errors="replace").splitlines()[-num_lines:])
