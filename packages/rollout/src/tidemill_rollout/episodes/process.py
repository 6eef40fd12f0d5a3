"""A process that runs to its end, with all processes that it starts."""

import asyncio
import os
import signal
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

_MAX_OUTPUT = 64 * 1024
_CLOSE_TIMEOUT_S = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class FinishedProcess:
    """What is left of a process: its exit code, and the last 64 KiB of each output."""

    code: int
    stdout: str
    stderr: str


async def run_process(
    args: Sequence[str], *, stdin: bytes, cwd: str | Path | None, env: Mapping[str, str]
) -> FinishedProcess:
    """Run a program until it exits, and kill the processes of its process group that remain.

    Cancelling the call kills all of them. The outputs are pipes of our own, because `Process.wait` of some versions of
    Python does not return while another process has a pipe of asyncio open. The input is a file, because writing to a
    pipe fails if the program has exited.
    """
    loop = asyncio.get_running_loop()
    tails = [_Tail(), _Tail()]
    with ExitStack() as readers:
        with ExitStack() as writers:
            given = writers.enter_context(tempfile.TemporaryFile())
            given.write(stdin)
            given.seek(0)
            pipes = []
            for tail in tails:
                reader, writer = os.pipe()
                pipes.append(writers.enter_context(os.fdopen(writer, "wb")))
                transport, _ = await loop.connect_read_pipe(lambda tail=tail: tail, os.fdopen(reader, "rb"))
                readers.callback(transport.close)
            process = await asyncio.create_subprocess_exec(
                *args,
                stdin=given,
                stdout=pipes[0],
                stderr=pipes[1],
                cwd=cwd,
                env=env,
                start_new_session=True,  # a process group of its own
            )
        try:
            code = await process.wait()
        finally:
            with suppress(ProcessLookupError):  # no process of the group remains
                os.killpg(process.pid, signal.SIGKILL)
        with suppress(TimeoutError):  # a process that left the group can keep a pipe open
            async with asyncio.timeout(_CLOSE_TIMEOUT_S):
                await asyncio.gather(*(tail.is_closed.wait() for tail in tails))
    stdout, stderr = (tail.data.decode(errors="replace") for tail in tails)
    return FinishedProcess(code=code, stdout=stdout, stderr=stderr)


class _Tail(asyncio.Protocol):
    """The last part of what comes through a pipe."""

    def __init__(self) -> None:
        self.data = b""
        self.is_closed = asyncio.Event()

    def data_received(self, data: bytes) -> None:
        self.data = (self.data + data)[-_MAX_OUTPUT:]

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_closed.set()
