"""Serves an engine of this process to senders in other processes."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from multiprocessing.connection import Connection, Listener
from pathlib import Path
from typing import Any

import pytest
from tidemill_weight_update import EngineClient

HELPERS = Path(__file__).with_name("helpers")
TRAINER = HELPERS / "trainer_script.py"

# Tests and the processes that they start import the helpers by name. Appended, so that no other module is hidden.
sys.path.append(str(HELPERS))


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


def _send(engine: EngineClient, *checkpoints: Path, world_size: int = 1, **spec: Any) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory(prefix="tidemill-weights-") as folder:
        defaults = {
            "folder": folder,
            "device": "cpu",
            "bucket_bytes": 1 << 16,
            "dtype": None,
            "rounds": 1,
            "link": False,
        }
        command = json.dumps(defaults | spec | {"checkpoints": [str(path) for path in checkpoints]})
        with Listener(os.path.join(folder, "engine"), authkey=b"test") as listener:
            senders = [
                subprocess.Popen(
                    [sys.executable, str(TRAINER), command],
                    env=os.environ | {"RANK": str(rank), "WORLD_SIZE": str(world_size), "OMP_NUM_THREADS": "1"},
                )
                for rank in range(world_size)
            ]
            try:
                with listener.accept() as connection:
                    stats = _serve(connection, engine)
                assert [sender.wait(timeout=60) for sender in senders] == [0] * world_size
                return stats
            finally:
                for sender in senders:
                    sender.kill()
                    sender.wait()


@pytest.fixture
def send() -> Callable[..., list[dict[str, Any]]]:
    """`send(engine, *checkpoints, world_size=1, **spec)`: sends them one after the other, from `world_size` processes.

    `spec`: device, bucket_bytes, dtype, rounds and link of `trainer_script.py`. Returns the statistics of each update.
    """
    return _send
