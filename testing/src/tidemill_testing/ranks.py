"""Functions on several gloo ranks of this machine."""

import faulthandler
import multiprocessing
import os
import queue
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cloudpickle

_PRELOAD = "tidemill_testing.preload"


def _rank_main(payload: bytes, rank: int, world_size: int, store: str, results: Any) -> None:
    import torch
    import torch.distributed as dist

    faulthandler.enable()  # the stack of a rank that ends by a signal such as SIGSEGV
    torch.set_num_threads(1)
    try:
        environment, fn, args = cloudpickle.loads(payload)
        os.environ.clear()  # the fork server has the environment of its own start
        os.environ.update(environment, RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
        dist.barrier()  # a rank whose `fn` leaves the group at once would close connections that others still open
        results.put((rank, None, cloudpickle.dumps(fn(*args))))
    except BaseException:  # noqa: BLE001 - sent to the parent, which raises it
        results.put((rank, time.monotonic(), traceback.format_exc()))
    if dist.is_initialized():
        dist.destroy_process_group()


def run_ranks(fn: Callable[..., Any], world_size: int, *args: Any, timeout_s: float = 120.0) -> list[Any]:
    """Call `fn(*args)` in `world_size` processes that share a gloo process group.

    On a machine without a GPU the processes are forked from a server that has imported most of what they need
    (`tidemill_testing.preload`), so after the first call they start in a fraction of a second. They have the caller's
    environment, with RANK, LOCAL_RANK and WORLD_SIZE set.

    Args:
        fn: function of a test module or of a package.
        world_size: number of processes.
        timeout_s: seconds until all ranks must have returned.

    Returns:
        Return value of each rank, in rank order (plain data or CPU tensors).

    Raises:
        RuntimeError: a rank raised (the message has its traceback), died, or did not return within `timeout_s`.
    """
    module = sys.modules.get(fn.__module__)
    by_value = module is not None and not fn.__module__.startswith("tidemill")
    if by_value:  # test modules cannot be imported by name in another process
        cloudpickle.register_pickle_by_value(module)
    try:
        payload = cloudpickle.dumps((dict(os.environ), fn, args))
    finally:
        if by_value:
            cloudpickle.unregister_pickle_by_value(module)
    start = context()
    with tempfile.TemporaryDirectory(prefix="tidemill-ranks-") as folder:
        results = start.Queue()
        store = str(Path(folder) / "store")
        processes = [
            start.Process(target=_rank_main, args=(payload, rank, world_size, store, results), daemon=True)
            for rank in range(world_size)
        ]
        for process in processes:
            process.start()
        try:
            return _collect(processes, results, time.monotonic() + timeout_s, timeout_s)
        finally:
            for process in processes:
                if process.is_alive():
                    process.kill()
                process.join()


def context() -> Any:
    """Return the multiprocessing context: a fork server with preloaded imports, or "spawn" where there are GPUs."""
    import torch

    # Some of the preloaded modules initialize CUDA, and a process forked after that cannot use it.
    if torch.cuda.is_available():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([_PRELOAD])
    return context


def _collect(processes: list[Any], results: Any, deadline: float, timeout_s: float) -> list[Any]:
    world_size = len(processes)
    values: dict[int, Any] = {}
    failures: list[tuple[float, int, str]] = []
    while len(values) < world_size:
        try:
            rank, failed_at, value = results.get(timeout=0.5)
        except queue.Empty:
            if failures:  # ranks that waited for the failed one have had time to report
                texts = [f"rank {rank} of {world_size} failed:\n{text}" for _, rank, text in sorted(failures)]
                raise RuntimeError("\n".join(texts)) from None
            missing = sorted(set(range(world_size)) - set(values))
            dead = [rank for rank in missing if not processes[rank].is_alive() and results.empty()]
            if dead:
                codes = {rank: processes[rank].exitcode for rank in dead}
                raise RuntimeError(f"ranks died without a result; exit codes {codes}") from None
            if time.monotonic() > deadline:
                raise RuntimeError(f"ranks {missing} of {world_size} did not finish within {timeout_s} s") from None
            continue
        if failed_at is None:
            values[rank] = cloudpickle.loads(value)
        else:
            failures.append((failed_at, rank, value))
    return [values[rank] for rank in range(world_size)]
