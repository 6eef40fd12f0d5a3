"""The folder of a run, `runs/<name>/`: config, metrics, rollouts, checkpoints, logs and report."""

import fcntl
import hashlib
import json
import math
import os
import re
import shlex
import socket
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from tidemill_dataproto import DataProto, ragged
from tidemill_engines.location import read_text, sizes, write_text

from tidemill_trainer.checkpoints import CheckpointError, Checkpoints
from tidemill_trainer.config_file import (
    ConfigError,
    config_to_dict,
    read_config,
    read_toml,
    save_config,
    with_absolute_paths,
)
from tidemill_trainer.run_config import RunConfig


class RunDir:
    """The files of one run. Each line of a `.jsonl` file is a JSON object with a `step`.

    Args:
        path: its folder.
        checkpoints: folder of the checkpoints, or its URL; None: as its `config.toml` says.

    Attributes:
        listeners: called with each line of metrics after it is written.
    """

    def __init__(self, path: Path, checkpoints: str | None = None) -> None:
        self.path = path
        self._checkpoints = checkpoints
        self.config = path / "config.toml"
        self.metrics = path / "metrics.jsonl"
        self.rollouts = path / "rollouts.jsonl"
        self.forks = path / "forks.jsonl"
        self.ledger = path / "ledger.jsonl"
        self.batches = path / "batches"
        self.initial_policy = path / "initial_policy"
        self.logs = path / "logs"
        self.report = path / "report.html"
        self.about = path / "assets" / "about.txt"  # description of the demo's problems
        self.lock = path / "lock"
        self.engine_requests = path / "engine_requests"
        self.listeners: list[Callable[[Mapping[str, Any]], None]] = []

    @property
    def checkpoints(self) -> str:
        """Folder of the checkpoints, or its URL."""
        if self._checkpoints is not None:
            return self._checkpoints
        trainer = read_toml(self.config).get("trainer", {}) if self.config.is_file() else {}
        return _checkpoints_of(self.path, trainer.get("checkpoint_dir"))

    def append_metrics(self, metrics: Mapping[str, Any]) -> None:
        """Append a line of metrics. Numbers that are not finite become null, since JSON does not have them."""
        infinite = {name for name, value in metrics.items() if isinstance(value, float) and not math.isfinite(value)}
        line = {**metrics, **dict.fromkeys(infinite)}
        _append(self.metrics, [line])
        for listener in self.listeners:
            listener(line)

    def append_rollouts(self, rollouts: Iterable[Mapping[str, Any]]) -> None:
        """Append one line per rollout. Types that JSON does not have, such as dates of a parquet file, become text."""
        _append(self.rollouts, rollouts)

    def append_forks(self, forks: Sequence[Mapping[str, Any]]) -> None:
        """Append one line per example of an episode that had to start another token sequence."""
        _append(self.forks, forks)

    def read_metrics(self) -> list[dict[str, Any]]:
        return list(read_lines(self.metrics))

    def read_rollouts(self) -> list[dict[str, Any]]:
        return list(self.iter_rollouts())

    def iter_rollouts(self) -> Iterator[dict[str, Any]]:
        return read_lines(self.rollouts)

    def read_forks(self) -> list[dict[str, Any]]:
        return list(read_lines(self.forks))

    def newest_checkpoint(self) -> int | None:
        """Return the step of the newest complete checkpoint; None if there is none."""
        return max(Checkpoints(self.checkpoints, max_to_keep=1).steps(), default=None)

    def has_data(self) -> bool:
        """Return whether the run has metrics or a checkpoint. A run whose start failed has neither."""
        return next(read_lines(self.metrics), None) is not None or self.newest_checkpoint() is not None

    def how_to_continue(self, command: str, *, saves: bool) -> str:
        """Return how to continue a run of `tidemill {command}` that stopped early, for the user.

        Args:
            saves: whether the run saves checkpoints.
        """
        try:
            saved = self.newest_checkpoint()
        except CheckpointError as error:
            return f"The run in {self.path} stopped. {error}"
        done = max((row["step"] for row in self.read_metrics()), default=0)
        text = f"The run in {self.path} stopped after step {done}"
        again = f"tidemill {command} {shlex.quote(str(self.config))}"
        if saved is not None:
            return f"{text}. Continue from the checkpoint of step {saved} with: {again} --resume"
        if self.has_data() and not saves:
            return f"{text} and saves no checkpoint (trainer.save_freq=-1), so it cannot continue."
        if self.has_data():
            return f"{text}, before its first checkpoint. Start it again from the beginning with: {again} --resume"
        return f"The run in {self.path} stopped before its first step. Start it again with: {again}"

    def check_data(self, train: DataProto) -> None:
        """Record the number and a hash of the training rows; with a checkpoint, compare them with those of its run.

        Raises:
            ConfigError: they have changed. The order of the rows depends on their number, and the ledger names rows.
        """
        path, found = self.path / "data.json", {"rows": len(train), "hash": _hash(train)}
        before = json.loads(path.read_text()) if path.is_file() else found
        if before != found and self.newest_checkpoint() is not None:
            raise ConfigError(
                f"cannot resume {self.path}: the training data has changed since its start ({before['rows']} rows "
                f"there, {len(train)} now, hash {before['hash']} and {found['hash']}); restore the files in "
                f"data.train_files, or choose another trainer.name to start a new run"
            )
        write_text(str(path), json.dumps(found))

    def begin(self, warn: Callable[[str], None]) -> None:
        """Move the metrics of an attempt without a checkpoint to a folder of their own, and report it to `warn`."""
        if next(read_lines(self.metrics), None) is not None:
            folder = self.path / f"stopped-{time.strftime('%Y%m%d-%H%M%S')}"
            folder.mkdir()
            of_loggers = self.path / "loggers", self.path / "tensorboard"
            for file in filter(Path.exists, (self.metrics, self.rollouts, self.forks, *of_loggers)):
                file.rename(folder / file.name)
            warn(f"the run has no checkpoint, so it begins again; the metrics of its steps are now in {folder}")
        self.remove_after(-1)  # an incomplete line

    def remove_after(self, step: int) -> None:
        """Remove metrics, rollouts and forks of steps after `step`, which a resumed run repeats."""
        for file in filter(Path.is_file, (self.metrics, self.rollouts, self.forks)):
            partial = file.with_suffix(".partial")
            partial.unlink(missing_ok=True)
            _append(partial, (row for row in read_lines(file) if row["step"] <= step))
            partial.replace(file)


def is_locked(lock: Path) -> bool:
    """Return whether a process holds the lock of a run, which means that the run is alive."""
    with lock.open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


@contextmanager
def open_run(config: RunConfig, stem: str, *, resume: bool) -> Iterator[RunDir]:
    """Create the folder of a new run, or find the one to resume, and lock it.

    A folder without metrics and checkpoints is used again, with any configuration.

    Args:
        stem: prefix of the run's name if the configuration has no name.
        resume: continue in an existing folder: the one with the configured name, or the newest with this stem.

    Raises:
        ConfigError: the folder of a new run exists already, there is no run to resume, it saves no checkpoints, it has
            another configuration (the message names the keys), another process uses it, or its checkpoints would be in
            a folder with those of another run.
    """
    config = with_absolute_paths(config)
    run = _find(config, stem) if resume else _create(config, stem)
    with _locked(run):
        if config.trainer.checkpoint_dir is not None:
            _claim_checkpoints(run)
        if run.has_data():
            if not resume:
                raise ConfigError(
                    f"the run {run.path} exists already; continue it with --resume, or choose another trainer.name"
                )
            try:
                old = read_config(type(config), run.config)
            except ConfigError as error:
                raise ConfigError(f"cannot resume {run.path}: {run.config}: {error}") from error
            check_same(config, old, run, "resume")
            if run.newest_checkpoint() is None and old.trainer.save_freq < 0:  # it may be complete
                raise ConfigError(
                    f"the run {run.path} cannot be resumed, because it saves no checkpoint (trainer.save_freq=-1); "
                    "choose another trainer.name to start a new run"
                )
        # The file contains the run's name, so it is sufficient to resume.
        trainer = replace(config.trainer, name=run.path.name)
        if trainer.ray_address == os.environ.get("RAY_ADDRESS"):  # the address of this job, not of the run
            trainer = replace(trainer, ray_address=None)
        save_config(replace(config, trainer=trainer), run.config)
        yield run


def _claim_checkpoints(run: RunDir) -> None:
    """Write the id of the run to the folder of its checkpoints, if that is not in the run's folder.

    Otherwise runs of the same name in other folders, of other users, would remove each other's checkpoints.
    """
    own, owner = run.path / "run_id", f"{run.checkpoints}/run_id"
    if not own.is_file():
        own.write_text(uuid.uuid4().hex)
    try:
        is_new = "run_id" not in sizes(run.checkpoints)
        if is_new:
            write_text(owner, own.read_text())
        is_own = is_new or read_text(owner) == own.read_text()
    except OSError as error:
        raise ConfigError(f"config key trainer.checkpoint_dir: {error}") from error
    if not is_own:
        raise ConfigError(
            f"{run.checkpoints} has the checkpoints of another run of this name; choose another trainer.name, or "
            "remove that folder"
        )


def _create(config: RunConfig, stem: str) -> RunDir:
    name = config.trainer.name or f"{stem}-{time.strftime('%Y%m%d-%H%M%S')}"
    path = Path(config.trainer.run_dir) / name
    run = RunDir(path, _checkpoints_of(path, config.trainer.checkpoint_dir))
    try:
        run.path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"config key trainer.run_dir: cannot create {path}: {error.strerror}") from error
    return run


def _checkpoints_of(run: Path, checkpoint_dir: str | None) -> str:
    return str(run / "checkpoints") if checkpoint_dir is None else f"{checkpoint_dir}/{run.absolute().name}"


def _find(config: RunConfig, stem: str) -> RunDir:
    parent, name = Path(config.trainer.run_dir), config.trainer.name
    dated = re.compile(re.escape(stem) + r"-\d{8}-\d{6}")
    folders = [parent / name] if name else sorted(path for path in parent.glob("*") if dated.fullmatch(path.name))
    # Prefer runs with data to runs whose start failed.
    folders = [path for path in folders if RunDir(path).has_data()] or folders
    if not folders or not (run := RunDir(folders[-1])).config.is_file():
        raise ConfigError(
            f"expected a run to resume at {parent / (name or f'{stem}-*')}, found none; check trainer.run_dir and "
            "trainer.name, or start without --resume"
        )
    return run


@contextmanager
def _locked(run: RunDir) -> Iterator[None]:
    """Hold the lock of the run. The kernel releases it when the process dies."""
    with run.lock.open("a+") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.seek(0)
            raise ConfigError(
                f"the run {run.path} is in use by {lock.read()}; wait until it ends, or stop it with Ctrl-C or SIGTERM"
            ) from None
        lock.truncate(0)
        lock.write(f"process {os.getpid()} on {socket.gethostname()}")
        lock.flush()
        yield


_OTHER_ROLES = ("reference", "critic", "teacher", "reward_model")

# Keys that may change in a resumed run without changing the experiment, in addition to all timeouts.
_MAY_CHANGE = frozenset(
    {
        *(f"trainer.{key}" for key in ("name", "run_dir", "total_steps", "stop_at_accuracy", "test_freq", "save_freq")),
        *(
            f"trainer.{key}"
            for key in ("max_ckpt_to_keep", "save_samples", "save_batches", "ray_address", "project_name", "logger")
        ),
        "trainer.max_restarts",
        "trainer.async_save",
        *("placement.engines", "placement.offload"),
        *(f"engine.{key}" for key in ("max_token_len_per_gpu", "param_offload", "grad_offload", "optimizer_offload")),
        *("engine.reshard_after_forward", "model.gradient_checkpointing"),
        *("trainer.nnodes", "rollout.num_engines", "rollout.tensor_parallel_size", "engine.offload_policy"),
        *(f"rollout.{key}" for key in ("mem_fraction_static", "max_total_tokens", "num_gpus_per_engine")),
        *(f"actor.{key}" for key in ("num_workers", "num_gpus_per_worker", "omp_num_threads")),
        *(f"episode.{key}" for key in ("num_workers", "max_concurrent", "max_retries", "max_error_share")),
        *(f"{role}.{key}" for role in _OTHER_ROLES for key in ("num_workers", "param_offload")),
        *("weight_update.bucket_bytes", "weight_update.memory"),
        *("rollout.max_log_prob_abs_diff", "rollout.max_restarts"),
    }
)

# Keys that may only be raised, which makes a run longer.
_MAY_RISE = frozenset({"trainer.total_epochs"})


def check_same(new: RunConfig, old: RunConfig, run: RunDir, what: str) -> None:
    """Reject a configuration that changes the experiment of a run.

    Args:
        new, old: the configuration, and that of the run.
        run: the run.
        what: what is done with it, "resume" or "replay".

    Raises:
        ConfigError: they differ in keys that may not change; the message names them.
    """
    before, after = config_to_dict(old), config_to_dict(new)
    changed = []
    for section in sorted(before.keys() | after.keys()):
        values, others = before.get(section, {}), after.get(section, {})
        for key in sorted(values.keys() | others.keys()):
            there, now = values.get(key), others.get(key)
            if there != now and not _may_change(f"{section}.{key}", there, now):
                limit = "; it may only be raised" if f"{section}.{key}" in _MAY_RISE else ""
                changed.append(f"{section}.{key} (there {there!r}, now {now!r}{limit})")
    if changed:
        choice = ", or choose another trainer.name" if what == "resume" else ""
        raise ConfigError(
            f"cannot {what} {run.path} with other values of {', '.join(changed)}; use those of {run.config}{choice}"
        )


def _may_change(name: str, there: Any, now: Any) -> bool:
    """Return whether a resumed run may have the value `now` of a key instead of `there`."""
    return name.endswith(".timeout_s") or name in _MAY_CHANGE or (name in _MAY_RISE and now > there)


def _append(file: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    with file.open("a") as lines:
        lines.writelines(json.dumps(row, default=str) + "\n" for row in rows)


def read_lines(file: Path) -> Iterator[dict[str, Any]]:
    """Yield the lines of a file of JSON; none if it does not exist.

    Raises:
        ConfigError: a line is not JSON.
    """
    if not file.is_file():
        return
    with file.open() as lines:
        for number, line in enumerate(lines, start=1):
            if not line.endswith("\n"):  # a killed run may leave an incomplete line
                continue
            try:
                row = json.loads(line)
            except ValueError as error:
                raise ConfigError(f"{file}, line {number}: expected JSON: {error}; remove the line") from error
            yield row


def _hash(batch: DataProto) -> str:
    """Return a hash of all columns, the same in each process; of objects such as images only their type is in it."""
    digest = hashlib.blake2b(digest_size=8)
    for name, column in sorted(batch.non_tensor_batch.items()):
        digest.update(json.dumps([name, *column.tolist()], default=lambda value: type(value).__name__).encode())
    for name in sorted(batch.batch.keys()):
        tensor = batch[name]
        is_ragged = ragged.is_ragged(tensor)
        lengths = ragged.lengths(tensor) if is_ragged else torch.tensor(tensor.shape)
        values = (ragged.values(tensor) if is_ragged else tensor).contiguous()
        digest.update(repr((name, str(values.dtype), lengths.tolist())).encode())
        digest.update(values.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
