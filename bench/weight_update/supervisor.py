"""Runs the ranks of a case in processes of their own, and ends all of them whatever happens."""

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

Tell = Callable[[str, Any], None]
"""`tell(kind, value)` sends a message to the supervisor, which also shows it that the rank makes progress."""

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
    """Calls `main(rank, folder, tell, *args)` in `num_ranks` processes, `on_message(kind, value)` for what they tell.

    Args:
        silence_s: when no rank has told anything for so long, all are ended. A message of the kind "patience" sets the
            limit until the next message; one of the kind "alive" says only that; "file" names one to remove in the end.
        limit_s: when this is over, all are ended, whatever they do.

    Raises:
        RuntimeError: a rank raised (its traceback is in the message), ended, or nothing was heard for too long.
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
            # Each rank leads a process group, in which its engine's processes are, too.
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
                    "it ended without a word; SGLang ends its parent when a scheduler fails, and says why above",
                )
            if kind in ("done", "failed"):
                del pending[rank]
            if kind == "failed":
                failures.append(f"rank {rank}: {value}")
                deadline = min(deadline, time.monotonic() + 5)  # the others may have something to say about it
            elif not failures:
                deadline = time.monotonic() + (value if kind == "patience" else silence_s)
            on_message(kind, value)
        now = time.monotonic()
        if now > min(deadline, limit):
            if not failures:
                why = f"{limit_s:g} s are over" if now > limit else "nothing was heard of them for too long"
                failures.append(f"ranks {sorted(pending)} did not end, and {why}; their stacks are above")
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

    def tell(kind: str, value: Any) -> None:
        sender.send((kind, value))

    try:
        main(rank, folder, tell, *args)
        tell("done", None)
    except BaseException:  # noqa: BLE001 - it is sent to the parent, which raises it
        tell("failed", traceback.format_exc())
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # not through the destructors of CUDA, NCCL and SGLang, which may wait for others
