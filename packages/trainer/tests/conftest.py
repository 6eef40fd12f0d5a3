import io
import logging
import os

import pytest
import ray
from rich.console import Console
from tidemill_trainer.demo import write_assets
from tidemill_trainer.demo.model import piece_tokenizer
from tidemill_trainer.progress import Progress


@pytest.fixture(scope="session")
def tokenizer():
    return piece_tokenizer("0123456789+=")


@pytest.fixture(scope="session")
def assets(tmp_path_factory):
    """Overrides with the paths of the demo's model and problems."""
    return write_assets(tmp_path_factory.mktemp("assets"))


@pytest.fixture(scope="module")
def ray_cluster():
    """Ray on this machine."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    yield
    ray.shutdown()


@pytest.fixture
def terminal():
    """The text that `progress` prints."""
    return io.StringIO()


@pytest.fixture
def progress(terminal):
    return Progress(Console(file=terminal, width=200))


@pytest.fixture
def config_file(tmp_path):
    """A configuration with only the path of the model."""
    path = tmp_path / "run.toml"
    path.write_text('[model]\npath = "m"\n')
    return path
