"""What a run leaves behind: `runs/<name>/` with config, metrics, rollouts, checkpoints, logs and report."""

import fcntl
import json
import math
import os
import re
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from tidemill_trainer.checkpoints import Checkpoints
from tidemill_trainer.config import Config
from tidemill_trainer.config_file import ConfigError, config_to_dict, load_config, save_config, with_absolute_paths


class RunDir:
    """The files of one run. Lines of `metrics.jsonl` and `rollouts.jsonl` are JSON objects with a `step`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = path / "config.toml"
        self.metrics = path / "metrics.jsonl"
        self.rollouts = path / "rollouts.jsonl"
        self.checkpoints = path / "checkpoints"
        self.logs = path / "logs"
        self.report = path / "report.html"
        self.about = path / "assets" / "about.txt"  # of a demo, what its problems are
        self.lock = path / "lock"

    def append_metrics(self, metrics: Mapping[str, Any]) -> None:
        """A number that is not finite is written as null, since JSON has none."""
        infinite = {name for name, value in metrics.items() if isinstance(value, float) and not math.isfinite(value)}
        _append(self.metrics, [{**metrics, **dict.fromkeys(infinite)}])

    def append_rollouts(self, rollouts: Sequence[Mapping[str, Any]]) -> None:
        """What JSON has no kind for, such as the dates of a parquet file, is written as text."""
        _append(self.rollouts, rollouts)

    def read_metrics(self) -> list[dict[str, Any]]:
        return list(_read(self.metrics))

    def read_rollouts(self) -> list[dict[str, Any]]:
        return list(_read(self.rollouts))

    def newest_checkpoint(self) -> int | None:
        """The step of the newest whole checkpoint."""
        return max(Checkpoints(self.checkpoints, max_to_keep=1).steps(), default=None)

    def has_begun(self) -> bool:
        """Whether anything was measured or saved; a run whose start failed has not, and may be started over."""
        return self.newest_checkpoint() is not None or next(_read(self.metrics), None) is not None

    def check_resumable(self) -> None:
        """Refuses to start over a run that has measured something, which would erase it.

        Raises:
            ConfigError: there are metrics, and no checkpoint.
        """
        if self.newest_checkpoint() is None and self.has_begun():
            raise ConfigError(
                f"{self.path} has metrics, but no checkpoint to resume from: trainer.save_freq makes them, and 0 makes "
                "one at the end only; choose another trainer.name to start again"
            )

    def how_to_continue(self) -> str:
        """What to tell the user of a run that has ended too soon."""
        done = max((row["step"] for row in self.read_metrics()), default=0)
        saved = self.newest_checkpoint()
        text = f"The run is in {self.path}, step {done} was the last"
        if saved is not None:
            return f"{text}; continue from its checkpoint of step {saved} with: tidemill train {self.config} --resume"
        if self.has_begun():
            return f"{text}; it has no checkpoint to continue from (trainer.save_freq makes them)"
        return f"The run is in {self.path}; nothing was measured yet, start it over with: tidemill train {self.config}"

    def forget_after(self, step: int) -> None:
        """Drops metrics and rollouts of steps after `step`, which a resumed run makes again."""
        for file in (self.metrics, self.rollouts):
            kept = [row for row in _read(file) if row["step"] <= step]
            partial = file.with_suffix(".partial")
            partial.unlink(missing_ok=True)
            _append(partial, kept)
            partial.replace(file)


@contextmanager
def open_run(config: Config, stem: str, *, resume: bool) -> Iterator[RunDir]:
    """Makes the folder of a new run, or finds the one to resume, and keeps other processes out of it.

    Args:
        stem: the run's name starts with it where the configuration gives no name.
        resume: continue in an existing folder: the one named, or the newest of this stem.

    Raises:
        ConfigError: the folder of a new run exists already, or there is none to resume, or it has no checkpoint, or was
            made with another configuration (the keys are named), or another process has it open. A folder in which
            nothing was measured or saved yet is started over, with any configuration.
    """
    config = with_absolute_paths(config)
    run = _find(config, stem) if resume else _make(config, stem)
    with _locked(run):
        if run.has_begun():
            run.check_resumable()
            if resume:
                _check_same(config, load_config(run.config), run)
            else:
                raise ConfigError(f"{run.path} exists; continue it with --resume, or choose another trainer.name")
        # With the run's name in it the file is enough to resume.
        save_config(replace(config, trainer=replace(config.trainer, name=run.path.name)), run.config)
        yield run


def _make(config: Config, stem: str) -> RunDir:
    run = RunDir(Path(config.trainer.run_dir) / (config.trainer.name or f"{stem}-{time.strftime('%Y%m%d-%H%M%S')}"))
    run.path.mkdir(parents=True, exist_ok=True)
    return run


def _find(config: Config, stem: str) -> RunDir:
    parent, name = Path(config.trainer.run_dir), config.trainer.name
    dated = re.compile(re.escape(stem) + r"-\d{8}-\d{6}")
    folders = [parent / name] if name else sorted(path for path in parent.glob("*") if dated.fullmatch(path.name))
    # A start that failed is not what somebody wants to continue, if there is another.
    folders = [path for path in folders if RunDir(path).has_begun()] or folders
    if not folders or not (run := RunDir(folders[-1])).config.is_file():
        raise ConfigError(f"there is no run to resume at {parent / (name or f'{stem}-*')}")
    return run


@contextmanager
def _locked(run: RunDir) -> Iterator[None]:
    """Holds the run's lock, which the kernel takes back from a process that ends, however it ends."""
    with run.lock.open("a+") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.seek(0)
            raise ConfigError(
                f"{run.path} is in use by {lock.read()}; wait for its end, or stop it with Ctrl-C or SIGTERM"
            ) from None
        lock.truncate(0)
        lock.write(f"process {os.getpid()} on {socket.gethostname()}")
        lock.flush()
        yield


# What a resumed run may do otherwise without becoming another experiment; and every deadline.
_MAY_CHANGE = frozenset(
    {
        *(f"trainer.{key}" for key in ("name", "run_dir", "total_steps", "stop_at_accuracy", "test_freq", "save_freq")),
        *(f"trainer.{key}" for key in ("max_ckpt_to_keep", "save_samples", "ray_address")),
        *(f"rollout.{key}" for key in ("mem_fraction_static", "max_total_tokens", "num_gpus_per_engine")),
        *(f"actor.{key}" for key in ("num_gpus_per_worker", "omp_num_threads")),
        "reward.on_error",
    }
)


def _check_same(new: Config, old: Config, run: RunDir) -> None:
    """Refuses to resume with a configuration that would make the rest another experiment."""
    before, after = config_to_dict(old), config_to_dict(new)
    changed = [
        f"{section}.{key}"
        for section in sorted(before.keys() | after.keys())
        for key in sorted(before.get(section, {}).keys() | after.get(section, {}).keys())
        if before.get(section, {}).get(key) != after.get(section, {}).get(key)
        and key != "timeout_s"
        and f"{section}.{key}" not in _MAY_CHANGE
    ]
    if changed:
        raise ConfigError(f"{run.path} was made with other values of {', '.join(changed)}; see {run.config}")


def _append(file: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    with file.open("a") as lines:
        lines.writelines(json.dumps(row, default=str) + "\n" for row in rows)


def _read(file: Path) -> Iterator[dict[str, Any]]:
    if not file.is_file():
        return
    with file.open() as lines:
        for line in lines:
            if line.endswith("\n"):  # a killed run may leave half a line
                yield json.loads(line)
