"""TensorBoard: event files in the folder of the run."""

import time
from collections.abc import Mapping

from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto.event_pb2 import Event  # type: ignore[attr-defined]  # protobuf creates it at import
from tensorboardX.summary import scalar

from tidemill_trainer.loggers.contract import Experiment


class TensorBoardLogger:
    """A `Logger` that writes `tensorboard/` in the folder of the run. A resumed run adds a file.

    tensorboardX's `SummaryWriter` writes in a thread. If the disk is full, that thread dies, and the next call blocks.
    """

    def __init__(self, experiment: Experiment) -> None:
        folder = experiment.folder / "tensorboard"
        folder.mkdir(exist_ok=True)
        self.run_id = experiment.name
        self.location = f"tensorboard --logdir {folder}"
        self._writer = EventsWriter(str(folder / "events"))

    def log(self, axis: str, step: int, numbers: Mapping[str, float]) -> None:
        for name, number in numbers.items():
            self._writer.write_event(Event(wall_time=time.time(), step=step, summary=scalar(name, number)))
        self._writer.flush()  # a killed run keeps all its steps

    def close(self, *, failed: bool) -> None:
        self._writer.close()
