"""Engines whose rank processes cannot map the trainer's memory, as if they were on another machine.

remote_engines.py SOCKET DEVICE      one rank; started by `NamespacedRankProcess`
"""

import os
import pickle
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any

import torch
from engine_state import LoaderState
from tidemill_testing import ranks
from tidemill_weight_update import Request
from tidemill_weight_update.control import board
from tidemill_weight_update.receive.receiver import Receiver
from tidemill_weight_update.remote.nccl import NcclWire
from tidemill_weight_update.remote.wire import GlooWire
from torch import Tensor
from toy_engines import TIED, ToyModel

AUTHKEY = b"test"


def _serve(path: str, device: str) -> None:
    """Run one engine rank: execute the commands of one client after the other until the command is "end"."""
    received = _count_received()
    receiver: Receiver | None = None
    model: ToyModel | None = None
    with Listener(path, authkey=AUTHKEY) as listener:
        while True:
            with listener.accept() as connection:
                try:
                    while True:
                        command, *args = connection.recv()
                        if command == "new":
                            model = ToyModel(*args).to(device)
                            receiver = Receiver(model, *args, lambda name: name == TIED, lambda: None)
                        elif command == "handle":
                            assert receiver is not None
                            _handle(receiver, args[0])
                        elif command == "end":
                            return
                        # Not `send`, which torch patches to share tensors instead of sending them.
                        connection.send_bytes(pickle.dumps(_answer(command, model, received)))
                except (EOFError, ConnectionError):
                    continue


def _handle(receiver: Receiver, request: Request) -> None:
    """Handle the request as the loader does inside SGLang, which logs errors."""
    try:
        receiver.handle(request)
    except Exception as error:  # noqa: BLE001
        print(f"the loader refused: {error}", file=sys.stderr, flush=True)


def _answer(command: str, model: ToyModel | None, received: list[int]) -> Any:
    if command == "state":
        assert model is not None
        return {name: parameter.detach().cpu() for name, parameter in model.named_parameters()}
    return {"received": received, "resources": resources()}.get(command)


def _count_received() -> list[int]:
    """Return a list that gets the size of each message received over a link."""
    received: list[int] = []
    for kind in (GlooWire, NcclWire):

        def recv(self, data: Tensor, original=kind.recv) -> None:
            received.append(data.numel())
            original(self, data)

        kind.recv = recv
    return received


def resources() -> tuple[int, int, int]:
    """Number of open files, of sockets among them, and of threads of this process."""
    files = [os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if _is_open(fd)]
    sockets = sum(file.startswith("socket:") for file in files)
    return len(files), sockets, len(os.listdir("/proc/self/task"))


def _is_open(fd: str) -> bool:
    return os.path.lexists(f"/proc/self/fd/{fd}")


def listening() -> set[tuple[str, int]]:
    """Addresses and ports on which this process listens."""
    addresses = set()
    for fd in os.listdir("/proc/self/fd"):
        if _is_open(fd) and os.readlink(f"/proc/self/fd/{fd}").startswith("socket:"):
            with socket.socket(fileno=os.dup(int(fd))) as opened:
                if opened.family in (socket.AF_INET, socket.AF_INET6) and opened.getsockopt(
                    socket.SOL_SOCKET, socket.SO_ACCEPTCONN
                ):
                    addresses.add(opened.getsockname()[:2])
    return addresses


def _pretend_to_be_remote() -> None:
    """Pretend that this process is on another machine, and forbid it to open files of other processes."""
    board.here = lambda: 1

    def forbid(event: str, args: tuple[Any, ...]) -> None:
        if event == "open" and re.match(rf"/proc/(?!self|{os.getpid()})[0-9]+/fd/", str(args[0])):
            raise PermissionError(f"{args[0]} is on another machine")

    def from_file(name: str, *args: Any, **kwargs: Any) -> Tensor:
        raise PermissionError(f"{name} is on another machine")

    sys.addaudithook(forbid)
    torch.from_file = from_file


class RankProcess:
    """Process that serves as one rank of an engine.

    Args:
        folder: folder of its socket.
        name: file name of the socket.
        device: device of the model.
        is_remote: whether it pretends to be on another machine.
    """

    def __init__(self, folder: Path, name: str, device: str = "cpu", *, is_remote: bool = True) -> None:
        self.path = str(folder / name)
        self._start(device, is_remote)

    def _start(self, device: str, is_remote: bool) -> None:
        self._process = ranks.context().Process(target=main, args=(self.path, device, is_remote), daemon=True)
        self._process.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait_until_up(self) -> None:
        deadline = time.monotonic() + 100
        while not os.path.exists(self.path):
            assert not board.has_exited(self.pid, board.here()), "the engine rank has ended"
            assert time.monotonic() < deadline, "the engine rank does not start"
            time.sleep(0.02)

    def kill(self) -> None:
        self._process.kill()
        self._process.join()


class NamespacedRankProcess(RankProcess):
    """Rank process in its own PID namespace, where /proc does not show other processes.

    Attributes:
        COMMAND: command that creates the namespace; requires the permission to do so.
    """

    COMMAND = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")

    def _start(self, device: str, is_remote: bool) -> None:
        command = [*self.COMMAND, sys.executable, __file__, self.path, device]
        self._process: Any = subprocess.Popen(command, env=os.environ | {"OMP_NUM_THREADS": "1"})

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()


def _connect(path: str) -> Connection:
    """Connect to a rank whose socket exists, but may not listen yet."""
    deadline = time.monotonic() + 10
    while True:
        try:
            return Client(path, authkey=AUTHKEY)
        except ConnectionRefusedError:
            assert time.monotonic() < deadline, "the engine rank does not listen"
            time.sleep(0.02)


class RemoteEngine(LoaderState):
    """Client of an engine whose ranks are `RankProcess`es.

    Args:
        paths: sockets of its ranks.
        name: name in messages.
        fresh: whether the ranks make new models.
    """

    def __init__(self, paths: list[str], name: str = "remote", *, fresh: bool = True) -> None:
        super().__init__(name, len(paths))
        self._connections = [_connect(path) for path in paths]
        if fresh:
            for rank, connection in enumerate(self._connections):
                self._ask(connection, "new", rank, len(paths))

    @staticmethod
    def _ask(connection: Connection, *command: Any) -> Any:
        connection.send(command)
        assert connection.poll(60), "the engine rank does not answer"
        return connection.recv()

    def ask_all(self, command: str, *args: Any) -> list[Any]:
        return [self._ask(connection, command, *args) for connection in self._connections]

    def state(self) -> list[dict[str, Tensor]]:
        return self.ask_all("state")

    def load(self, request: Request, *, flush_cache: bool) -> None:
        for connection in self._connections:
            connection.send(("handle", request))
        ended = []
        deadline = time.monotonic() + request.timeout_s + 2
        for rank, connection in enumerate(self._connections):
            try:
                if not connection.poll(max(0, deadline - time.monotonic())):
                    raise RuntimeError(f"rank {rank} did not answer")
                connection.recv()
            except (EOFError, ConnectionError):
                ended.append(rank)
        if ended:
            raise RuntimeError(f"ranks {ended} have ended")

    def close(self) -> None:
        for connection in self._connections:
            connection.close()


def settled(read: Callable[[], Any], is_wanted: Callable[[Any], bool]) -> Any:
    """Poll `read` until `is_wanted(value)` or for 20 s; return the last value. Threads exit with a delay."""
    deadline = time.monotonic() + 20
    while not is_wanted(value := read()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return value


def steady(read: Callable[[], Any]) -> Any:
    """Poll `read` until its value has not changed for half a second, or for three seconds; return the last value."""
    deadline, same_since = time.monotonic() + 3, time.monotonic()
    value = read()
    while time.monotonic() < min(deadline, same_since + 0.5):
        time.sleep(0.05)
        if (now := read()) != value:
            value, same_since = now, time.monotonic()
    return value


def main(path: str, device: str, is_remote: bool) -> None:
    torch.set_num_threads(1)
    if is_remote:
        _pretend_to_be_remote()
    _serve(path, device)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], False)
