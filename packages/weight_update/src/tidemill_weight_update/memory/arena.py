"""Arenas: memory that the sender fills and an engine's processes read."""

import os
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from tidemill_weight_update.memory.handle import CudaMemory, HostMemory, Memory

M = TypeVar("M", covariant=True)


class Arena(Protocol[M]):
    """A block of memory that other processes can map."""

    @property
    def data(self) -> Tensor:
        """uint8 [capacity in bytes]."""
        ...

    def publish(self) -> M:
        """Makes what was written to `data` visible and says where it is."""
        ...

    def close(self) -> None:
        """Releases the memory."""
        ...


class HostArena:
    """A memfd: shared memory without a name, that ends with its last user however that user ends.

    Other processes of the same user and PID namespace open it as `/proc/<pid>/fd/<n>` while this process lives.
    """

    def __init__(self, num_bytes: int) -> None:
        # Linux grants any size and ends a process, not always this one, when the pages are touched.
        available = _available_bytes()
        if num_bytes > available:
            raise RuntimeError(
                f"a bucket needs {num_bytes / 1e9:.3g} GB of shared memory, {available / 1e9:.3g} GB are available; "
                f"choose smaller bucket_bytes (a bucket is at least as large as the largest tensor)"
            )
        self._fd = os.memfd_create("tidemill-weights")
        self._num_bytes = num_bytes
        try:
            os.ftruncate(self._fd, num_bytes)
            self.data = torch.from_file(f"/proc/self/fd/{self._fd}", True, num_bytes, dtype=torch.uint8)
        except (OSError, RuntimeError):
            os.close(self._fd)
            raise

    def publish(self) -> HostMemory:
        return HostMemory(path=f"/proc/{os.getpid()}/fd/{self._fd}", num_bytes=self._num_bytes)

    def close(self) -> None:
        del self.data
        os.close(self._fd)


def _available_bytes() -> int:
    """Memory of this machine that can be had without swapping."""
    with open("/proc/meminfo") as meminfo:
        fields = dict(line.split(":", 1) for line in meminfo)
    return int(fields["MemAvailable"].split()[0]) * 1024


def new_arena(device: torch.device, num_bytes: int) -> Arena[Memory]:
    """An arena of `num_bytes` on `device`.

    Raises:
        ValueError: no arena can be made there.
    """
    if device.type == "cpu":
        return HostArena(max(num_bytes, 1))
    if device.type == "cuda":
        from tidemill_weight_update.memory.cuda_memory import DeviceArena

        return DeviceArena(max(num_bytes, 1), device)
    raise ValueError(f"weights can be sent from cpu or cuda memory, got {device}; pass device='cpu' to stage")


class ArenaRing:
    """Arenas taken in turn, each grown to the largest bucket it had to hold.

    One on the host: when an engine has answered, it has copied. Two on a GPU: the answer to a bucket proves that the
    copies of the bucket before it are done (see `sglang.payload`), so a bucket goes where the one before the last was.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._arenas: list[Arena[HostMemory | CudaMemory] | None] = [None] * (2 if device.type == "cuda" else 1)
        self._turn = 0

    def next(self, num_bytes: int) -> Arena[HostMemory | CudaMemory]:
        """The arena for the next bucket, with room for `num_bytes`; its former content may be overwritten."""
        self._turn = (self._turn + 1) % len(self._arenas)
        arena = self._arenas[self._turn]
        if arena is None or arena.data.numel() < num_bytes:
            if arena is not None:
                self._arenas[self._turn] = None
                arena.close()
            arena = self._new(max(num_bytes, 1))
            self._arenas[self._turn] = arena
        return arena

    def _new(self, num_bytes: int) -> Arena[HostMemory | CudaMemory]:
        if self._device.type == "cpu":
            return HostArena(num_bytes)
        if self._device.type == "cuda":
            from tidemill_weight_update.memory.cuda import CudaArena

            return CudaArena(num_bytes, self._device)
        raise ValueError(f"weights can be sent from cpu or cuda memory, got {self._device}; pass device='cpu' to stage")

    def close(self) -> None:
        for arena in self._arenas:
            if arena is not None:
                arena.close()
        self._arenas = [None] * len(self._arenas)
