"""Engine ranks and trainer ranks in processes of their own, which can be stopped and killed."""

import multiprocessing
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from tidemill_weight_update import EngineClient, PauseMode, Request, WeightUpdater
from tidemill_weight_update.receive.receiver import Receiver
from torch import Tensor
from toy_engines import TIED, ToyModel, tensors
from trainer_script import EngineProxy

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["torch", "torch.distributed.fsdp", "tidemill_weight_update.receive.receiver"])


def _serve_rank(rank: int, size: int, connection: Connection) -> None:
    torch.set_num_threads(1)
    model = ToyModel(rank, size)
    receiver = Receiver(model, rank, size, lambda name: name == TIED, lambda: None)
    connection.send((0, None))
    while True:
        try:
            number, request = connection.recv()
        except EOFError:
            return
        if request is not None:
            receiver.handle(request)
        state = {name: p.detach().clone().numpy(force=True) for name, p in _as_float(model)}
        connection.send((number, state))


def _as_float(model: ToyModel) -> Iterator[tuple[str, Tensor]]:
    """numpy, which connections carry without sharing memory, has no bfloat16."""
    for name, parameter in model.named_parameters():
        yield name, parameter.detach().float()


class ProcessEngine:
    """An `EngineClient` whose ranks are processes.

    Args:
        tp_size: number of ranks.
        name: in messages.
        timeout_s: longest wait for a rank's answer.
    """

    has_loader = True

    def __init__(self, tp_size: int, name: str, timeout_s: float = 60.0) -> None:
        self.tp_size = tp_size
        self.name = name
        self.version = "first"
        self.paused: str | None = None
        self._timeout_s = timeout_s
        self.start()

    def __repr__(self) -> str:
        return self.name

    def start(self) -> None:
        pairs = [CONTEXT.Pipe() for _ in range(self.tp_size)]
        self.processes = [
            CONTEXT.Process(target=_serve_rank, args=(rank, self.tp_size, theirs), daemon=True)
            for rank, (_, theirs) in enumerate(pairs)
        ]
        self._connections = [ours for ours, _ in pairs]
        self._number = 0  # of the last question
        for process, (_, theirs) in zip(self.processes, pairs, strict=True):
            process.start()
            theirs.close()
        self._answers(60.0)

    def close(self) -> None:
        for process, connection in zip(self.processes, self._connections, strict=True):
            process.kill()
            process.join()
            connection.close()

    def load(self, request: Request, *, flush_cache: bool) -> None:
        self._ask(request)

    def state(self) -> list[dict[str, Tensor]]:
        """The parameters of each rank, as float32."""
        return [{name: torch.from_numpy(array) for name, array in rank.items()} for rank in self._ask(None)]

    def _ask(self, request: Request | None) -> list[dict[str, Any]]:
        self._number += 1
        for connection in self._connections:
            connection.send((self._number, request))
        return self._answers(self._timeout_s)

    def _answers(self, timeout_s: float) -> list[Any]:
        deadline = time.monotonic() + timeout_s
        answers = []
        for rank, connection in enumerate(self._connections):
            number, answer = -1, None
            while number != self._number:  # else it comes too late, of a question before
                if not connection.poll(max(0.0, deadline - time.monotonic())):
                    raise TimeoutError(f"rank {rank} did not answer within {timeout_s} s")
                number, answer = connection.recv()
            answers.append(answer)
        return answers

    def load_bucket(self, bucket: object) -> None:
        raise AssertionError("an engine with our loader gets no buckets")

    def flush_cache(self) -> None:
        raise AssertionError("an engine with our loader flushes in load()")

    def pause(self, mode: PauseMode) -> None:
        self.paused = mode

    def resume(self) -> None:
        self.paused = None

    def set_weight_version(self, version: str) -> None:
        self.version = version

    def get_weight_version(self) -> str:
        return self.version


def _trainer(rank: int, world_size: int, store: str, connection: Connection, killed: int, mode: str) -> None:
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size))
    if world_size > 1:
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)

    def items() -> Iterator[tuple[str, Tensor]]:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import Replicate, Shard, distribute_tensor

        for count, (name, tensor) in enumerate(tensors(1).items()):
            if count == 8 and rank == killed:
                os.kill(os.getpid(), signal.SIGKILL)
            if world_size > 1:
                mesh = init_device_mesh("cpu", (world_size,))
                tensor = distribute_tensor(
                    tensor, mesh, [Shard(0) if tensor.dim() else Replicate()], src_data_rank=None
                )
            yield name, tensor

    engines = [EngineProxy(connection)] if rank == 0 else []
    updater = WeightUpdater(engines, bucket_bytes=100, timeout_s=20)
    try:
        given = items()
        stats = updater.update(given if mode == "streaming" else list(given), "from a process")
        told = f"verified {stats.verified}"
    except RuntimeError as error:
        told = f"{type(error).__name__}: {error}"
    if rank == 0:
        connection.send(("done", told, {}))
    os._exit(0)  # the group may be broken


@contextmanager
def trainers(world_size: int, store: str, killed: int, mode: str) -> Iterator[Connection]:
    """Trainer ranks that send `tensors(1)`; rank `killed` is killed on the way.

    Yields:
        the connection by which rank 0 asks for what the engine shall do.
    """
    ours, theirs = CONTEXT.Pipe()
    processes = [
        CONTEXT.Process(target=_trainer, args=(rank, world_size, store, theirs, killed, mode), daemon=True)
        for rank in range(world_size)
    ]
    for process in processes:
        process.start()
    theirs.close()
    try:
        yield ours
    finally:
        for process in processes:
            process.join(30)
            process.kill()
        ours.close()


def serve(engine: EngineClient, connection: Connection) -> str | None:
    """Does what rank 0 of a trainer asks; its last words, or None if it ended without."""
    while True:
        try:
            method, args, kwargs = connection.recv()
            if method == "done":
                return args
            value = getattr(engine, method)
            connection.send((True, value(*args, **kwargs) if callable(value) else value))
        except (EOFError, ConnectionError):
            return None
