"""Engine with one large parameter, in its own process, on the GPU of the trainer."""

import multiprocessing
from multiprocessing.connection import Connection

import torch
from engine_state import LoaderState
from tidemill_weight_update import Request
from tidemill_weight_update.receive.receiver import Receiver
from torch import nn

SHAPE = (128, 16384, 2048)
"""Shape of fused experts: 8.6 GB in bfloat16."""


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(SHAPE, dtype=torch.bfloat16, device="cuda"), requires_grad=False)

    def load_weights(self, weights) -> None:
        for _, tensor in weights:
            self.weight.data.copy_(tensor)


def _serve(connection: Connection) -> None:
    model = Experts()
    receiver = Receiver(model, 0, 1, lambda name: False, lambda: None)
    connection.send(None)
    while (command := connection.recv()) is not None:
        if isinstance(command, Request):
            receiver.handle(command)
            connection.send(None)
        else:
            connection.send([part.double().sum().item() for part in model.weight])


class LargeEngine(LoaderState):
    """`EngineClient` whose only rank is a process on the same GPU."""

    def __init__(self) -> None:
        super().__init__("large")
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs,), daemon=True)
        self.process.start()
        self.connection.recv()

    def ask(self, command: object):
        self.connection.send(command)
        return self.connection.recv()

    def load(self, request: Request, *, flush_cache: bool) -> None:
        self.ask(request)

    def close(self) -> None:
        self.connection.send(None)
        self.process.join(10)
        self.process.kill()
