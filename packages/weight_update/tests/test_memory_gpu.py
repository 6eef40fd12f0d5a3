"""How much memory of a GPU an update takes, whatever the largest tensor."""

import multiprocessing
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection

import pytest
import torch
from tidemill_weight_update import PauseMode, Request, WeightUpdater
from tidemill_weight_update.receive.receiver import Receiver
from torch import Tensor, nn

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

SHAPE = (128, 16384, 2048)
"""Of fused experts: 8.6 GB in bfloat16."""


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


class OtherProcess:
    """An `EngineClient` whose only rank is a process on the same GPU."""

    tp_size = 1
    has_loader = True

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs,), daemon=True)
        self.process.start()
        self.connection.recv()
        self.version = ""

    def ask(self, command: object):
        self.connection.send(command)
        return self.connection.recv()

    def load(self, request: Request, *, flush_cache: bool) -> None:
        self.ask(request)

    def load_bucket(self, bucket: object) -> None:
        raise AssertionError("an engine with our loader gets no buckets")

    def flush_cache(self) -> None:
        raise AssertionError("an engine with our loader flushes in load()")

    def pause(self, mode: PauseMode) -> None:
        pass

    def resume(self) -> None:
        pass

    def set_weight_version(self, version: str) -> None:
        self.version = version

    def get_weight_version(self) -> str:
        return self.version

    def close(self) -> None:
        self.connection.send(None)
        self.process.join(10)
        self.process.kill()


@contextmanager
def taken() -> Iterator[list[int]]:
    """Appends the most bytes of the device that all processes together took, beyond what they had before."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before, most, stop, out = torch.cuda.mem_get_info()[0], 0, threading.Event(), []

    def watch() -> None:
        nonlocal most
        while not stop.wait(0.0005):
            most = max(most, before - torch.cuda.mem_get_info(0)[0])

    thread = threading.Thread(target=watch)
    thread.start()
    yield out
    stop.set()
    thread.join()
    out.append(max(most, before - torch.cuda.mem_get_info()[0]))


@pytest.fixture
def engine() -> Iterator[OtherProcess]:
    started = OtherProcess()
    yield started
    started.close()


@pytest.mark.parametrize("bucket_mib", [16, 256])
@pytest.mark.parametrize("mode", ["complete", "streaming"])
@pytest.mark.parametrize("held", [torch.float32, torch.bfloat16], ids=str)
def test_an_update_takes_two_buckets_whatever_the_largest_tensor(engine, held, mode, bucket_mib):
    weight = torch.empty(SHAPE, dtype=held, device="cuda")
    for part in weight:
        part.normal_()
    items: list[tuple[str, Tensor]] = [("experts.weight", weight)]
    updater = WeightUpdater([engine], bucket_bytes=bucket_mib << 20, dtype=torch.bfloat16, timeout_s=60)
    most = 0
    for version in range(2):
        with taken() as extra:
            stats = updater.update(items if mode == "complete" else iter(items), version)
        most = max(most, extra[0])
        assert stats.verified
        assert stats.num_bytes == 2 * weight.numel()
    print(f"{held}, {mode}, buckets of {bucket_mib} MiB: {most / 2**20:.0f} MiB more, {stats.num_buckets} buckets")
    assert most <= (2 * bucket_mib + 64) << 20
    wanted = [part.bfloat16().double().sum().item() for part in weight]
    assert engine.ask("sums") == wanted
    updater.close()
