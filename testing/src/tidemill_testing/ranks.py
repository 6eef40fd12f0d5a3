"""Functions on several gloo ranks of this machine."""

import faulthandler
import multiprocessing
import os
import queue
import re
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cloudpickle

_PRELOAD = "tidemill_testing.preload"
_GRACE_S = 10.0
"""Seconds for the other ranks to report their failures, and for a rank that a signal hit to write stacks and core."""


def _rank_main(payload: bytes, rank: int, world_size: int, folder: str, results: Any) -> None:
    import torch
    import torch.distributed as dist

    os.dup2(os.open(_stderr(folder, rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
    faulthandler.enable()  # the stacks of a rank that ends by a signal such as SIGSEGV: Python's, and C++'s
    torch._C._set_print_stack_traces_on_fatal_signal(True)
    torch.set_num_threads(1)
    try:
        environment, fn, args = cloudpickle.loads(payload)
        os.environ.clear()  # the fork server has the environment of its own start
        os.environ.update(environment, RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world_size)
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
    environment, with RANK, LOCAL_RANK and WORLD_SIZE set. What they write to stderr appears when all have ended.

    Args:
        fn: function of a test module or of a package.
        world_size: number of processes.
        timeout_s: seconds until all ranks must have returned.

    Returns:
        Return value of each rank, in rank order (plain data or CPU tensors).

    Raises:
        RuntimeError: a rank raised (the message has its traceback), died (its exit code, and after a signal such as
            SIGSEGV the C++ stack of the thread that it hit), or did not return within `timeout_s`.
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
        processes = [
            start.Process(target=_rank_main, args=(payload, rank, world_size, folder, results), daemon=True)
            for rank in range(world_size)
        ]
        for process in processes:
            process.start()
        try:
            return _collect(processes, results, folder, timeout_s)
        finally:
            for rank, process in enumerate(processes):
                if process.is_alive():
                    process.kill()
                process.join()
                os.write(2, _read(_stderr(folder, rank)))


def context() -> Any:
    """Return the multiprocessing context: a fork server with preloaded imports, or "spawn" where there are GPUs."""
    import torch

    # Some of the preloaded modules initialize CUDA, and a process forked after that cannot use it.
    if torch.cuda.is_available():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([_PRELOAD])
    return context


def _stderr(folder: str, rank: int) -> Path:
    return Path(folder) / f"stderr_{rank}"


def _read(file: Path) -> bytes:
    return file.read_bytes() if file.exists() else b""


def _collect(processes: list[Any], results: Any, folder: str, timeout_s: float) -> list[Any]:
    world_size, deadline = len(processes), time.monotonic() + timeout_s
    values: dict[int, Any] = {}
    failures: list[tuple[float, int, str]] = []
    grace = 0.0  # until when the other ranks may report
    while len(values) < world_size:
        try:
            rank, failed_at, value = results.get(timeout=0.5)
        except queue.Empty:
            missing = sorted(set(range(world_size)) - set(values))
            alive = {rank for rank in missing if processes[rank].is_alive() or not results.empty()}
            reported = {rank for _, rank, _ in failures}
            dead = [rank for rank in missing if rank not in alive | reported or processes[rank].exitcode]
            if failures or dead:
                grace = grace or time.monotonic() + _GRACE_S
                if alive and time.monotonic() < grace:
                    continue
                texts = [f"rank {rank} of {world_size} {_end_of(processes[rank], folder, rank)}" for rank in dead]
                texts += [f"rank {rank} of {world_size} failed:\n{text}" for _, rank, text in sorted(failures)]
                raise RuntimeError("\n".join(texts)) from None
            if time.monotonic() > deadline:
                raise RuntimeError(f"ranks {missing} of {world_size} did not finish within {timeout_s} s") from None
            continue
        if failed_at is None:
            values[rank] = cloudpickle.loads(value)
        else:
            failures.append((failed_at, rank, value))
    return [values[rank] for rank in range(world_size)]


def _end_of(process: Any, folder: str, rank: int) -> str:
    """Describe how a rank ended, with the C++ stack of the thread that a signal such as SIGSEGV hit."""
    stacks = re.split(r"\n(?=\w+\(\d+\), PID: )", _read(_stderr(folder, rank)).decode(errors="replace"))
    hit = [stack for stack in stacks if "FatalSignalHandler::fatalSignalHandler" in stack]
    return f"ended with exit code {process.exitcode}\n" + "".join(hit[:1])
