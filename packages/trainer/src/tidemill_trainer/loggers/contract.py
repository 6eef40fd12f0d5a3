"""What a logger receives and provides."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

RL_AXIS = "step"  # number of the step of reinforcement learning
WARMUP_AXIS = "sft/step"  # number of the step of the warm-up; all its metrics begin with "sft/"


@dataclass(frozen=True, kw_only=True, slots=True)
class Experiment:
    """A run, for the start of a logger.

    Attributes:
        project: name that groups runs (`trainer.project_name`).
        name: name of the run.
        folder: folder of the run.
        config: configuration of the run as nested dicts.
        run_id: id of the logger's run to continue; None starts a new one.
    """

    project: str
    name: str
    folder: Path
    config: Mapping[str, Any]
    run_id: str | None


class Logger(Protocol):
    """A running logger. Every method may raise; `Loggers` handles that.

    Attributes:
        run_id: id with which a resumed run continues this one.
        location: where the user finds the metrics.
    """

    run_id: str
    location: str

    def log(self, axis: str, step: int, numbers: Mapping[str, float]) -> None:
        """Log the metrics of one step.

        Args:
            axis: the name of the number `step`: `RL_AXIS` or `WARMUP_AXIS`. Names of the warm-up begin with "sft/".
            step: number of the step, larger than in all earlier calls with this axis.
            numbers: finite numbers by name.
        """
        ...

    def close(self, *, failed: bool) -> None:
        """Send what is left, and mark the run as finished or failed."""
        ...
