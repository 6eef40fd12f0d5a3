"""Runs the ranks of a case in separate processes, and kills all of them in the end, whatever happens."""

import contextlib
import ctypes
import faulthandler
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

SendMessage = Callable[[str, Any], None]
"""`send_message(kind, value)` sends a message to the supervisor, which also counts as progress of the rank."""

_PR_SET_PDEATHSIG = 1


def run_ranks(
    main: Callable[..., None],
    num_ranks: int,
    args: tuple[Any, ...],
    on_message: Callable[[str, Any], None],
    *,
    silence_s: float,
    limit_s: float,
) -> None:
    """Call `main(rank, folder, send_message, *args)` in `num_ranks` processes, and `on_message(kind, value)` for their
    messages.

    Args:
        silence_s: kill all ranks after this time without a message. A message of kind "patience" sets the limit until
            the next message; "alive" only counts as progress; "file" names a file to remove at the end.
        limit_s: kill all ranks after this time in any case.

    Raises:
        RuntimeError: a rank raised (its traceback is in the message), exited, or sent no message in time.
    """
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="tm-bench-") as folder:
        processes, connections = [], []
        files: list[str] = []

        def take(kind: str, value: Any) -> None:
            if kind == "file":
                files.append(value)
            elif kind not in ("done", "failed", "patience", "alive"):
                on_message(kind, value)

        try:
            for rank in range(num_ranks):
                receiver, sender = context.Pipe(duplex=False)
                process = context.Process(target=_rank_main, args=(main, rank, folder, sender, args))
                process.start()
                sender.close()
                processes.append(process)
                connections.append(receiver)
            _listen(connections, [process.pid for process in processes], take, silence_s, limit_s)
        finally:
            # Each rank leads a process group that includes its engine's processes.
            for process in processes:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
            for process in processes:
                process.join()
            for path in files:
                Path(path).unlink(missing_ok=True)


def _listen(
    connections: list[Connection],
    pids: list[int],
    on_message: Callable[[str, Any], None],
    silence_s: float,
    limit_s: float,
) -> None:
    pending = dict(enumerate(connections))
    limit = time.monotonic() + limit_s
    deadline = time.monotonic() + silence_s
    failures: list[str] = []
    while pending:
        ready = wait(list(pending.values()), timeout=1.0)
        for rank in [rank for rank, connection in pending.items() if connection in ready]:
            kind: str
            value: Any
            try:
                kind, value = pending[rank].recv()
            except EOFError:
                kind, value = (
                    "failed",
                    "it exited without a message; SGLang kills its parent when a scheduler fails, see the log above",
                )
            if kind in ("done", "failed"):
                del pending[rank]
            if kind == "failed":
                failures.append(f"rank {rank}: {value}")
                deadline = min(deadline, time.monotonic() + 5)  # other ranks may report related errors
            elif not failures:
                deadline = time.monotonic() + (value if kind == "patience" else silence_s)
            on_message(kind, value)
        now = time.monotonic()
        if now > min(deadline, limit):
            if not failures:
                why = f"the limit of {limit_s:g} s has passed" if now > limit else "they sent no message in time"
                failures.append(f"ranks {sorted(pending)} did not finish: {why}; their stacks are above")
                for rank in pending:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pids[rank], signal.SIGUSR1)
                time.sleep(1)
            break
    if failures:
        raise RuntimeError("\n".join(failures))


def _rank_main(main: Callable[..., None], rank: int, folder: str, sender: Connection, args: tuple[Any, ...]) -> None:
    os.setpgid(0, 0)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    os.environ["TMPDIR"] = tempfile.tempdir = folder  # SGLang leaves sockets there

    def send_message(kind: str, value: Any) -> None:
        sender.send((kind, value))

    try:
        main(rank, folder, send_message, *args)
        send_message("done", None)
    except BaseException:  # noqa: BLE001 - it is sent to the parent, which raises it
        send_message("failed", traceback.format_exc())
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # skips the destructors of CUDA, NCCL and SGLang, which may wait for other processes
