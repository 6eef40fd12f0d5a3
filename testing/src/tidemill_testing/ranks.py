"""Runs a function on several gloo ranks of this machine."""

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

    torch.set_num_threads(1)
    try:
        environment, fn, args = cloudpickle.loads(payload)
        os.environ.clear()  # the server's is of the time when it started
        os.environ.update(environment, RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
        results.put((rank, None, cloudpickle.dumps(fn(*args))))
    except BaseException:  # noqa: BLE001 - it is sent to the parent, which raises it
        results.put((rank, time.monotonic(), traceback.format_exc()))
    if dist.is_initialized():
        dist.destroy_process_group()


def run_ranks(fn: Callable[..., Any], world_size: int, *args: Any, timeout_s: float = 120.0) -> list[Any]:
    """Calls `fn(*args)` on `world_size` processes that share a gloo process group.

    On a machine without a GPU the processes are forked from a server that has imported most of what they need
    (`tidemill_testing.preload`), so that starting them takes a fraction of a second after the first call. They have the
    caller's environment; RANK, LOCAL_RANK and WORLD_SIZE are set.

    Returns:
        What `fn` returned on each rank, in rank order (plain data or CPU tensors).

    Raises:
        RuntimeError: a rank raised (its traceback is in the message), died, or did not finish within `timeout_s`.
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
    """How processes are started: forked from a server that has imported much already; where there are GPUs, afresh."""
    import torch

    # Some of what the server imports looks at the GPUs, after which no process forked from it can use them.
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
            rank, failed_at, value = results.get(timeout=0.2)
        except queue.Empty:
            if failures:  # the ranks that waited for the one that failed have had time to say so
                _, rank, text = min(failures)
                raise RuntimeError(f"rank {rank} of {world_size} failed:\n{text}") from None
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
