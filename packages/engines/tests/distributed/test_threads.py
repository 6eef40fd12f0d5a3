"""The number of CPU threads of an engine's process."""

import pytest
import torch
from tidemill_engines.distributed.device import limit_threads


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield torch.get_num_threads
    torch.set_num_threads(before)


def test_one_thread_beside_a_gpu_unless_the_user_sets_it(threads, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    limit_threads(torch.device("cpu"))
    assert threads() == 2
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    limit_threads(torch.device("cuda"))
    assert threads() == 2
    monkeypatch.delenv("OMP_NUM_THREADS")
    limit_threads(torch.device("cuda"))
    assert threads() == 1
