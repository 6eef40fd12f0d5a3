"""Engine ranks and trainer ranks in their own processes, which can be stopped and killed."""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from engine_state import LoaderState
from tidemill_testing import ranks
from tidemill_weight_update import EngineClient, Request, WeightUpdater
from tidemill_weight_update.receive.receiver import Receiver
from torch import Tensor
from toy_engines import TIED, ToyModel, tensors
from trainer_process import EngineProxy

CONTEXT = ranks.context()


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
    """Parameters as float32: they are sent as numpy arrays, which have no bfloat16."""
    for name, parameter in model.named_parameters():
        yield name, parameter.detach().float()


class ProcessEngine(LoaderState):
    """`EngineClient` whose ranks are processes.

    Args:
        tp_size: number of ranks.
        name: name in messages.
        timeout_s: timeout of the answer of a rank.
    """

    def __init__(self, tp_size: int, name: str, timeout_s: float = 60.0) -> None:
        super().__init__(name, tp_size)
        self._timeout_s = timeout_s
        self.start()

    def start(self) -> None:
        pairs = [CONTEXT.Pipe() for _ in range(self.tp_size)]
        self.processes = [
            CONTEXT.Process(target=_serve_rank, args=(rank, self.tp_size, remote_end), daemon=True)
            for rank, (_, remote_end) in enumerate(pairs)
        ]
        self._connections = [local_end for local_end, _ in pairs]
        self._number = 0  # of the last request
        for process, (_, remote_end) in zip(self.processes, pairs, strict=True):
            process.start()
            remote_end.close()
        self._answers(60.0)

    def close(self) -> None:
        for process, connection in zip(self.processes, self._connections, strict=True):
            process.kill()
            process.join()
            connection.close()

    def load(self, request: Request, *, flush_cache: bool) -> None:
        self._ask(request)

    def state(self) -> list[dict[str, Tensor]]:
        """Parameters of each rank, as float32."""
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
            while number != self._number:  # skip late answers to earlier requests
                if not connection.poll(max(0.0, deadline - time.monotonic())):
                    raise TimeoutError(f"rank {rank} did not answer within {timeout_s} s")
                number, answer = connection.recv()
            answers.append(answer)
        return answers


def _trainer(rank: int, world_size: int, store: str, connection: Connection, killed: int, mode: str) -> None:
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size))
    if world_size > 1:
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)

    made = []

    def items() -> Iterator[tuple[str, Tensor]]:
        made.append(None)
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import Replicate, Shard, distribute_tensor

        for count, (name, tensor) in enumerate(tensors(1).items()):
            if count == 8 and rank == killed and len(made) == (2 if mode == "function" else 1):
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
        stats = updater.update(items if mode == "function" else items(), "from a process")
        outcome = f"verified {stats.verified}"
    except RuntimeError as error:
        outcome = f"{type(error).__name__}: {error}"
    if rank == 0:
        connection.send(("done", outcome, {}))
    os._exit(0)  # the process group may be broken


@contextmanager
def trainers(world_size: int, store: str, killed: int, mode: str) -> Iterator[Connection]:
    """Start trainer ranks that send `tensors(1)`; rank `killed` kills itself during the update.

    Yields:
        the connection on which rank 0 calls the engine.
    """
    local_end, remote_end = CONTEXT.Pipe()
    processes = [
        CONTEXT.Process(target=_trainer, args=(rank, world_size, store, remote_end, killed, mode), daemon=True)
        for rank in range(world_size)
    ]
    for process in processes:
        process.start()
    remote_end.close()
    try:
        yield local_end
    finally:
        for process in processes:
            process.join(30)
            process.kill()
        local_end.close()


def serve(engine: EngineClient, connection: Connection) -> str | None:
    """Execute the calls of trainer rank 0; return the outcome that it reports, or None if it was killed."""
    while True:
        try:
            method, args, kwargs = connection.recv()
            if method == "done":
                return args
            value = getattr(engine, method)
            connection.send((True, value(*args, **kwargs) if callable(value) else value))
        except (EOFError, ConnectionError):
            return None
