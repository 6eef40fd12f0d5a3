import json

import pytest
from tidemill_trainer.demo.assets import write_assets


@pytest.fixture(scope="session")
def chat_assets(tmp_path_factory):
    """Overrides with the paths of the model and the conversations of `tidemill demo sft`."""
    return write_assets(tmp_path_factory.mktemp("chat_assets"), task="sft")


@pytest.fixture
def write(tmp_path):
    """`write(name, rows)`: write a JSON lines file and return its path."""

    def make(name, rows):
        path = tmp_path / f"{name}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return str(path)

    return make
