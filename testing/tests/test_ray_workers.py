"""Workers of Ray that are forked from a server."""

import os
import sys

import pytest
import torch

ray = pytest.importorskip("ray")

pytestmark = [
    pytest.mark.ray,
    pytest.mark.skipif(torch.cuda.is_available(), reason="where there is a GPU, Ray starts its workers itself"),
]


def state():
    return os.getppid(), "transformers" in sys.modules, os.environ["COLOR"]


@pytest.fixture
def cluster():
    ray.init(address="local", num_cpus=1, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    yield
    ray.shutdown()


def test_workers_have_the_imports_of_the_server_and_the_environment_of_their_task(cluster):
    task = ray.remote(num_cpus=0)(state)
    red, blue = ray.get([task.options(runtime_env={"env_vars": {"COLOR": it}}).remote() for it in ("red", "blue")])
    server, *_ = red
    assert red == (server, True, "red")
    assert blue == (server, True, "blue")
