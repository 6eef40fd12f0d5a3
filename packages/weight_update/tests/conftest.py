"""Fixture `send`: update an engine of this process from trainer ranks in other processes."""

import os
import sys
import tempfile
from collections.abc import Callable
from multiprocessing.connection import Connection, Listener
from pathlib import Path
from typing import Any

import pytest
from tidemill_testing import ranks
from tidemill_weight_update import EngineClient

# Tests and the processes that they start import the helpers by name. Appended, so that no other module is hidden.
sys.path.append(str(Path(__file__).with_name("helpers")))


def _serve(connection: Connection, engine: EngineClient) -> list[dict[str, Any]]:
    while True:
        method, args, kwargs = connection.recv()
        if method == "done":
            return args
        try:
            value = getattr(engine, method)
            connection.send((True, value(*args, **kwargs) if callable(value) else value))
        except RuntimeError as error:
            connection.send((False, str(error)))


def _send(engine: EngineClient, *checkpoints: Path, world_size: int = 1, **fields: Any) -> list[dict[str, Any]]:
    import trainer_process

    paths = tuple(str(path) for path in checkpoints)
    with tempfile.TemporaryDirectory(prefix="tidemill-weights-") as folder:
        spec = trainer_process.TrainerSpec(folder=folder, world_size=world_size, checkpoints=paths, **fields)
        with Listener(os.path.join(folder, "engine"), authkey=trainer_process.AUTHKEY) as listener:
            trainers = [
                ranks.context().Process(target=trainer_process.main, args=(spec, rank, dict(os.environ)), daemon=True)
                for rank in range(world_size)
            ]
            for trainer in trainers:
                trainer.start()
            try:
                with listener.accept() as connection:
                    stats = _serve(connection, engine)
                for trainer in trainers:
                    trainer.join(60)
                assert [trainer.exitcode for trainer in trainers] == [0] * world_size
                return stats
            finally:
                for trainer in trainers:
                    trainer.kill()
                    trainer.join()


@pytest.fixture
def send() -> Callable[..., list[dict[str, Any]]]:
    """`send(engine, *checkpoints, world_size=1, **fields)`: send the checkpoints in turn, from `world_size` processes.

    `fields`: those of `trainer_process.TrainerSpec`. Returns the statistics of each update.
    """
    return _send
