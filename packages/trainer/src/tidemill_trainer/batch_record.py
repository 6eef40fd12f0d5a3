"""The record of a run: for each step the batch that was trained, and what came out of it."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tidemill_trainer.config_file import ConfigError
from tidemill_trainer.rollout.episode_file import load_episodes, save_episodes
from tidemill_trainer.rollout.episode_task import Episodes

_NOT_REPEATABLE = ("perf/", "timing_s/")


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordedStep:
    """A step in the record.

    Attributes:
        episodes: the episodes as they left the rollouts; the prompts of their problems are empty.
        metrics: metrics of the batch and the update, except speed and memory.
        weights: hash of the weights after the update for each rank, by model.
    """

    episodes: Episodes
    metrics: Mapping[str, float]
    weights: Mapping[str, list[str]]


class BatchRecord:
    """The recorded steps in `folder`, one file `step_000123.safetensors` per step.

    Args:
        folder: folder of all files.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def steps(self) -> list[int]:
        """Return the numbers of all recorded steps, ascending."""
        return sorted(int(path.stem.removeprefix("step_")) for path in self.folder.glob("step_*.safetensors"))

    def path(self, step: int) -> Path:
        return self.folder / f"step_{step:06d}.safetensors"

    def save(self, step: int, recorded: RecordedStep) -> None:
        """Write a step; the file appears when it is complete."""
        self.folder.mkdir(exist_ok=True)
        info = {"metrics": repeatable(recorded.metrics), "weights": dict(recorded.weights)}
        save_episodes(self.path(step), recorded.episodes, **info)

    def load(self, step: int) -> RecordedStep:
        """Read a step.

        Raises:
            ConfigError: it is not recorded, or its file is damaged.
        """
        path = self.path(step)
        if not path.is_file():
            raise ConfigError(f"step {step} is not recorded: {path} does not exist; choose other --steps")
        try:
            episodes, info = load_episodes(path)
        except ValueError as error:
            raise ConfigError(
                f"the record of step {step} cannot be read: {error}; restore the file, or choose --steps that do not "
                "require it"
            ) from error
        return RecordedStep(episodes=episodes, metrics=info["metrics"], weights=info["weights"])

    def remove_after(self, step: int) -> None:
        """Remove the steps after `step`, which a resumed run repeats."""
        for number in self.steps():
            if number > step:
                self.path(number).unlink()


def repeatable(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the metrics that depend on the batch and the weights alone."""
    return {name: value for name, value in metrics.items() if not name.startswith(_NOT_REPEATABLE)}
