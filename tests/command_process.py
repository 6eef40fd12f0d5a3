"""The command `tidemill` in a process of its own."""

import getpass
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

BACKENDS = {"fsdp2": (), "megatron": ("engine.backend=megatron", "engine.tp=2")}
SMALL = (
    "data.train_batch_size=8",
    "rollout.n=4",
    "warmup.max_steps=0",
    "trainer.test_freq=0",
    "trainer.val_before_train=false",
)
_REWARDS = """
def right_digits(data_source, solution_str, ground_truth, extra_info):
    return sum(a == b for a, b in zip(solution_str, ground_truth)) / 3
"""
# Libraries that SGLang imports create these once for all runs of a user.
_CACHES = {f"torchinductor_{getpass.getuser()}", getpass.getuser()}


def run_dir(recipe: Sequence[str]) -> Path:
    """Return the folder of the runs of the fixture `recipe`."""
    return Path(recipe[-1].removeprefix("trainer.run_dir="))


def partial_rewards(recipe: Sequence[str]) -> str:
    """Return the override for a reward for each digit: without a warm-up, exact matches are too rare."""
    file = run_dir(recipe).parent / "rewards.py"
    file.write_text(_REWARDS)
    return f"reward.function={file}:right_digits"


class Command:
    """`tidemill ...` in its own process group, as in a terminal, and all processes that it started."""

    def __init__(self, *args: str, after: "Command | None" = None) -> None:
        """`after`: a killed command, whose leftovers this one must remove."""
        self.shared_before = set(os.listdir("/dev/shm")) if after is None else after.shared_before
        self.temporary = tempfile.TemporaryDirectory() if after is None else after.temporary
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tidemill_trainer", *args],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            # In TMPDIR, the paths of Ray's sockets would be too long.
            env=os.environ | {"TMPDIR": self.temporary.name, "RAY_TMPDIR": tempfile.gettempdir()},
        )
        self.output = ""
        self.started: set[psutil.Process] = set()

    def kill(self) -> None:
        """Kill all processes after a failed test."""
        if self.process.poll() is None:
            for process in [*psutil.Process(self.process.pid).children(recursive=True), self.process]:
                process.kill()
            self.process.wait()
        self.temporary.cleanup()

    def wait_for(self, pattern: str, timeout_s: float = 240) -> None:
        assert self.process.stdout is not None
        deadline = time.monotonic() + timeout_s
        for line in self.process.stdout:
            self.output += line
            if re.search(pattern, line):
                self.started = set(psutil.Process(self.process.pid).children(recursive=True))
                return
            assert time.monotonic() < deadline, self.output
        raise AssertionError(f"the command exited before it printed {pattern!r}:\n{self.output}")

    def find(self, name: str, timeout_s: float = 10) -> psutil.Process:
        """Return the process whose title contains `name`."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            self.started |= set(psutil.Process(self.process.pid).children(recursive=True))
            for process in self.started:
                if name in title(process):
                    return process
            time.sleep(0.2)
        raise AssertionError(f"no {name} among {sorted(map(title, self.started))}")

    def end(self, timeout_s: float = 120) -> int:
        """Wait for the exit, check that no process and no file is left, and return the exit status."""
        rest, _ = self.process.communicate(timeout=timeout_s)
        self.output += rest
        _, alive = psutil.wait_procs(self.started, timeout=15)
        assert not alive, [process.cmdline() for process in alive]
        left = [path for path in Path("/dev/shm").iterdir() if path.name not in self.shared_before]
        mapped = _mapped_inodes()
        assert [path for path in left if path.exists() and path.stat().st_ino not in mapped] == []
        files = [path for path in Path(self.temporary.name).rglob("*") if not path.is_dir()]
        folders = {path.name for path in Path(self.temporary.name).iterdir()}
        assert files == []
        assert folders - _CACHES == set()
        return self.process.returncode

    def check_one_error(self, message: str) -> None:
        """Check that the command printed one error, which matches `message`, and no traceback."""
        errors = [line for line in self.output.splitlines() if line.startswith("error:")]
        assert len(errors) == 1, self.output
        assert re.search(message, self.output), self.output
        assert "Traceback" not in self.output


def _mapped_inodes() -> set[int]:
    """Return the inodes of files in /dev/shm that other processes have mapped; those of the command have exited."""
    inodes: set[int] = set()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        try:
            inodes.update(int(line.split()[4]) for line in maps.read_text().splitlines() if " /dev/shm/" in line)
        except (FileNotFoundError, ProcessLookupError, PermissionError):  # exited, or of another user
            continue
    return inodes


def title(process: psutil.Process) -> str:
    """Return the command line, or that of Ray or SGLang, which name their processes."""
    try:
        return " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return "(exited)"
