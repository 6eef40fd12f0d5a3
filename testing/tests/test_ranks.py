import ctypes
import os
import signal
import time
from pathlib import Path

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


def test_rank_that_exits_without_a_result_is_named_before_those_that_waited_for_it():
    with pytest.raises(RuntimeError, match=r"(?s)^rank 0 of 2 ended with exit code 7\n.*rank 1 of 2 failed"):
        run_ranks(_die, 2)


def _crash():
    if dist.get_rank() == 1:
        threads = {thread: (thread / "comm").read_text() for thread in Path("/proc/self/task").iterdir()}
        gloo = next(int(thread.name) for thread, name in threads.items() if name == "pt_gloo_runloop\n")
        ctypes.CDLL(None).tgkill(os.getpid(), gloo, signal.SIGSEGV)
        time.sleep(60)
    dist.barrier()


def test_rank_that_ends_by_a_signal_is_reported_with_the_stack_of_the_thread_that_it_hit():
    with pytest.raises(RuntimeError, match=rf"^rank 1 of 2 ended with exit code -{signal.SIGSEGV:d}\n") as caught:
        run_ranks(_crash, 2)
    assert "c10d::ProcessGroupGloo::runLoop" in str(caught.value).split("rank 0 of 2 failed")[0]
    assert "gloo::transport::tcp::Loop" not in str(caught.value)  # another thread


def _print():
    os.write(2, b"from a rank")


def test_stderr_of_ranks_is_that_of_the_test(capfd):
    run_ranks(_print, 1)
    assert "from a rank" in capfd.readouterr().err


def _sleep():
    import time

    time.sleep(60)


def test_timeout_names_the_ranks_that_did_not_finish():
    with pytest.raises(RuntimeError, match=r"ranks \[0, 1\] of 2 did not finish within 2"):
        run_ranks(_sleep, 2, timeout_s=2)
