"""Forwards the lines of `metrics.jsonl` to the configured loggers."""

import json
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from tidemill_engines.location import write_text

from tidemill_trainer.config_file import ConfigError, config_to_dict
from tidemill_trainer.loggers.contract import RL_AXIS, WARMUP_AXIS, Experiment, Logger
from tidemill_trainer.progress import Progress
from tidemill_trainer.run_config import RunConfig
from tidemill_trainer.run_dir import RunDir


def _tensorboard(experiment: Experiment) -> Logger:
    from tidemill_trainer.loggers.tensorboard import TensorBoardLogger

    return TensorBoardLogger(experiment)


def _wandb(experiment: Experiment) -> Logger:
    from tidemill_trainer.loggers.wandb import WandbLogger

    return WandbLogger(experiment)


def _mlflow(experiment: Experiment) -> Logger:
    from tidemill_trainer.loggers.mlflow import MLflowLogger

    return MLflowLogger(experiment)


# The names are those of `TrainerConfig.logger`, and of the extras of this package with the dependencies.
FACTORIES: dict[str, Callable[[Experiment], Logger]] = {
    "tensorboard": _tensorboard,
    "wandb": _wandb,
    "mlflow": _mlflow,
}
_IN_FOLDER = ("tensorboard",)
"""Loggers whose metrics are in the folder of the run, so that a copy of it has them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Row:
    """A line of `metrics.jsonl` as loggers receive it: the number of the step, its axis, and finite numbers."""

    axis: str
    step: int
    numbers: dict[str, float]

    @classmethod
    def of(cls, line: Mapping[str, Any]) -> "_Row":
        """Convert a line. Metrics of the warm-up get the prefix "sft/", since its steps have other numbers."""
        is_warmup = line.get("phase") == "sft"
        axis = WARMUP_AXIS if is_warmup else RL_AXIS
        prefix = "sft/" if is_warmup else ""
        numbers = {
            name if name.startswith(prefix) else f"{prefix}{name}": float(value)
            for name, value in line.items()
            if name not in (RL_AXIS, WARMUP_AXIS) and isinstance(value, int | float) and math.isfinite(value)
        }
        return cls(axis=axis, step=line[axis], numbers=numbers)


class _Forwarder:
    """One logger of a run, and the file with its run's id and the last step that it has of each axis."""

    def __init__(self, name: str, run: RunDir, config: RunConfig) -> None:
        self._file = run.path / "loggers" / f"{name}.json"
        state = json.loads(self._file.read_text()) if self._file.is_file() else {}
        self._name = run.path.name
        if name not in _IN_FOLDER and state.get("name", self._name) != self._name:  # of a run that was copied
            state = {}
        self._last: dict[str, int] = state.get("last", {})
        experiment = Experiment(
            project=config.trainer.project_name,
            name=self._name,
            folder=run.path.absolute(),
            config=config_to_dict(config),
            run_id=state.get("run_id"),
        )
        self.logger = FACTORIES[name](experiment)
        self._save()

    def log(self, row: _Row) -> None:
        """Log the row, unless its step was logged before."""
        if row.step <= self._last.get(row.axis, -1):
            return
        self.logger.log(row.axis, row.step, row.numbers)
        self._last[row.axis] = row.step
        self._save()

    def _save(self) -> None:
        state = {"name": self._name, "run_id": self.logger.run_id, "last": self._last}
        write_text(str(self._file), json.dumps(state))


@contextmanager
def open_loggers(config: RunConfig, run: RunDir, progress: Progress) -> Iterator[None]:
    """Start the loggers of `trainer.logger`, and forward each line of metrics to them during the block.

    A resumed run continues the run of each logger, which first receives the lines that it lacks. A logger that fails
    later is reported once and receives no more lines; `metrics.jsonl` has everything.

    Raises:
        ConfigError: a logger's package is not installed, or the logger cannot start.
    """
    active: dict[str, _Forwarder] = {}
    failed = True

    def listener(line: Mapping[str, Any]) -> None:
        _forward(line, active, progress)

    try:
        for name in config.trainer.logger:
            with progress.waiting(f"starting the logger {name}"):
                active[name] = _start(name, run, config)
            progress.info(f"metrics are also in: {active[name].logger.location}")
        saved = run.newest_checkpoint()
        for line in run.read_metrics():
            if saved is not None and line["step"] <= saved:  # a resumed run repeats the later ones
                listener(line)
        run.listeners.append(listener)
        yield
        failed = False
    finally:
        run.listeners[:] = [other for other in run.listeners if other is not listener]
        for name, forwarder in active.items():
            try:
                forwarder.logger.close(failed=failed)
            except Exception as error:  # noqa: BLE001 - the result of the training is more important
                progress.warn(f"the logger {name} could not send everything: {_describe(error)}")


def _start(name: str, run: RunDir, config: RunConfig) -> _Forwarder:
    try:
        return _Forwarder(name, run, config)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f'config key trainer.logger: "{name}" requires {error.name}, which is not installed; install it with: '
            f"pip install 'tidemill-trainer[{name}]'"
        ) from error
    except Exception as error:
        raise ConfigError(
            f'config key trainer.logger: cannot start "{name}": {_describe(error)}; correct this, or remove "{name}" '
            "from trainer.logger"
        ) from error


def _forward(line: Mapping[str, Any], active: dict[str, _Forwarder], progress: Progress) -> None:
    row = _Row.of(line)
    for name, forwarder in list(active.items()):
        try:
            forwarder.log(row)
        except Exception as error:  # noqa: BLE001 - a server must not stop the training, and metrics.jsonl is complete
            del active[name]
            progress.warn(
                f"the logger {name} failed at {row.axis} {row.step} and is disabled; the training continues, and "
                f"metrics.jsonl has all steps: {_describe(error)}"
            )


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
