"""Arenas: memory that the sender fills and an engine's processes read."""

import os
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor

from tidemill_weight_update.memory.handle import CudaMemory, HostMemory, Memory

M_co = TypeVar("M_co", covariant=True)
M = TypeVar("M")


class Arena(Protocol[M_co]):
    """A block of memory that other processes can map."""

    @property
    def data(self) -> Tensor:
        """uint8 [capacity in bytes]."""
        ...

    def publish(self) -> M_co:
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
        path, inode = f"/proc/{os.getpid()}/fd/{self._fd}", os.fstat(self._fd).st_ino
        return HostMemory(path=path, num_bytes=self._num_bytes, inode=inode)

    def close(self) -> None:
        del self.data
        os.close(self._fd)


def _available_bytes() -> int:
    """Memory of this machine that can be had without swapping."""
    with open("/proc/meminfo") as meminfo:
        fields = dict(line.split(":", 1) for line in meminfo)
    return int(fields["MemAvailable"].split()[0]) * 1024


def new_arena(device: torch.device, num_bytes: int) -> Arena[Memory]:
    """An arena of `num_bytes` on `device`, for engines with our loader.

    Raises:
        ValueError: no arena can be made there.
    """
    _check_device(device)
    if device.type == "cpu":
        return HostArena(max(num_bytes, 1))
    from tidemill_weight_update.memory.cuda_memory import DeviceArena

    return DeviceArena(max(num_bytes, 1), device)


def new_stock_arena(device: torch.device, num_bytes: int) -> Arena[HostMemory | CudaMemory]:
    """An arena of `num_bytes` on `device`, which SGLang opens by itself.

    Raises:
        ValueError: no arena can be made there.
    """
    _check_device(device)
    if device.type == "cpu":
        return HostArena(max(num_bytes, 1))
    from tidemill_weight_update.memory.cuda import CudaArena

    return CudaArena(max(num_bytes, 1), device)


def _check_device(device: torch.device) -> None:
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"weights can be sent from cpu or cuda memory, got {device}; pass device='cpu' to stage")


class ArenaRing(Generic[M]):
    """Arenas taken in index, each grown to the most that it had to hold.

    Args:
        length: how many they are.
        new: makes one for so many bytes.
    """

    def __init__(self, length: int, new: Callable[[int], Arena[M]]) -> None:
        self._new = new
        self._arenas: list[Arena[M] | None] = [None] * length
        self._next_index = 0

    def rewind(self) -> None:
        """Begins with the first one again, so that one bucket at a time always lies in the same."""
        self._next_index = 0

    def next(self, num_bytes: int) -> Arena[M]:
        """The next arena, with room for `num_bytes`; what it held may be overwritten."""
        index = self._next_index
        self._next_index = (index + 1) % len(self._arenas)
        arena = self._arenas[index]
        if arena is None or arena.data.numel() < num_bytes:
            if arena is not None:
                self._arenas[index] = None  # freed before there is another one
                arena.close()
            arena = self._arenas[index] = self._new(num_bytes)
        return arena

    def close(self) -> None:
        for arena in self._arenas:
            if arena is not None:
                arena.close()
        self._arenas = [None] * len(self._arenas)
