import os

import pytest
import torch
import torch.distributed as dist
from tidemill_testing import run_ranks


def _sum(x):
    value = torch.tensor(float(x + dist.get_rank()))
    dist.all_reduce(value)
    return value.item()


def test_all_ranks_share_a_process_group():
    assert run_ranks(_sum, 3, 10) == [33.0] * 3


def _raise():
    if dist.get_rank() == 1:
        raise KeyError("lost")
    dist.barrier()


def test_error_of_a_rank_names_the_rank_and_its_exception():
    with pytest.raises(RuntimeError, match=r"(?s)rank 1 of 2 failed.*KeyError: 'lost'"):
        run_ranks(_raise, 2)


def _die():
    if dist.get_rank() == 0:
        os._exit(7)
    dist.barrier()


def test_rank_that_exits_without_a_result_is_an_error():
    with pytest.raises(RuntimeError, match=r"rank"):
        run_ranks(_die, 2)


def _sleep():
    import time

    time.sleep(60)


def test_timeout_names_the_ranks_that_did_not_finish():
    with pytest.raises(RuntimeError, match=r"ranks \[0, 1\] of 2 did not finish within 2"):
        run_ranks(_sleep, 2, timeout_s=2)
