"""A wire between the GPUs of two processes, over NCCL."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.distributed import DistError
from torch.distributed.distributed_c10d import Store

from tidemill_weight_update.control.wait import PollingWait
from tidemill_weight_update.transport.nccl_library import Communicator, NcclError, unique_id
from tidemill_weight_update.transport.wire import TRAINER, WireError


class NcclWire:
    """GPU memory over NVLink, InfiniBand or TCP, as NCCL selects. Transfers run on the wire's own stream.

    The caller synchronizes the device before it starts a transfer: kernels of other communicators that run at the same
    time could deadlock with it.

    Args:
        store: store through which the sides find each other.
        name: name of the wire.
        rank: TRAINER or ENGINE.
        device: the GPU.
        timeout_s: longest wait for the other side.
    """

    def __init__(self, store: Store, name: str, rank: int, device: torch.device, timeout_s: float) -> None:
        self._device = device
        self._peer = 1 - rank
        self._stream = torch.cuda.Stream(device)
        try:
            if rank == TRAINER:
                identity = unique_id()
                store.set(f"{name}/nccl", identity)  # type: ignore[arg-type]
            else:
                identity = store.get(f"{name}/nccl")
            with torch.cuda.device(device):
                self._communicator = Communicator(identity, rank, 2)
        except (NcclError, DistError) as error:
            raise WireError(f"could not be connected ({error})") from error
        try:
            self._until(self._communicator.is_settled, timeout_s, _nothing)
        except WireError:
            self.close()
            raise

    def send(self, data: Tensor) -> None:
        self._start(self._communicator.send, data)

    def recv(self, data: Tensor) -> None:
        self._start(self._communicator.recv, data)

    def wait(self, timeout_s: float, check: Callable[[], None]) -> None:
        self._until(self._communicator.is_settled, timeout_s, check)
        done = torch.cuda.Event()
        with torch.cuda.device(self._device):
            done.record(self._stream)
        self._until(lambda: self._communicator.is_settled() and done.query(), timeout_s, check)

    def close(self) -> None:
        with torch.cuda.device(self._device):
            self._communicator.abort()

    def _start(self, transfer: Callable[[int, int, int, int], None], data: Tensor) -> None:
        try:
            with torch.cuda.device(self._device):
                transfer(data.data_ptr(), data.numel(), self._peer, self._stream.cuda_stream)
        except NcclError as error:
            raise WireError(f"broke ({error})") from error

    def _until(self, over: Callable[[], bool], timeout_s: float, check: Callable[[], None]) -> None:
        wait = PollingWait(timeout_s, "the other side", check)
        try:
            while not over():
                wait.pause()
        except (NcclError, TimeoutError) as error:
            raise WireError(f"broke ({error})") from error


def _nothing() -> None:
    pass
