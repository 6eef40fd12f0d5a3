"""TensorBoard: event files in the folder of the run."""

from collections.abc import Mapping

from tensorboardX import SummaryWriter

from tidemill_trainer.loggers.contract import Experiment


class TensorBoardLogger:
    """A `Logger` that writes `tensorboard/` in the folder of the run. A resumed run adds a file."""

    def __init__(self, experiment: Experiment) -> None:
        folder = experiment.folder / "tensorboard"
        self.run_id = experiment.name
        self.location = f"tensorboard --logdir {folder}"
        self._writer = SummaryWriter(str(folder))

    def log(self, axis: str, step: int, numbers: Mapping[str, float]) -> None:
        for name, number in numbers.items():
            self._writer.add_scalar(name, number, step)
        self._writer.flush()  # a killed run keeps all its steps

    def close(self, *, failed: bool) -> None:
        self._writer.close()
