"""Memory that other processes map: its descriptions, arenas that the sender fills, and mappings in an engine."""

import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing import reductions

from tidemill_weight_update.cuda_memory import DeviceArena, DeviceMemory, ImportedMemory


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorEntry:
    """One tensor of a bucket: its name, shape and dtype, and its byte range `[start, end)` in the arena."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    start: int
    end: int

    @property
    def num_bytes(self) -> int:
        return self.end - self.start

    def view(self, arena: Tensor) -> Tensor:
        """Return the tensor inside `arena` (uint8 [num_bytes]), sharing its memory."""
        return arena[self.start : self.end].view(self.dtype).view(self.shape)


@dataclass(frozen=True, kw_only=True, slots=True)
class HostMemory:
    """Memory of the sender that other processes of this machine and user can map as the file `path`.

    `inode` identifies the file: the descriptor number in the path may belong to another file later.
    """

    path: str
    num_bytes: int
    inode: int


Memory = HostMemory | DeviceMemory


@dataclass(frozen=True, kw_only=True, slots=True)
class CudaMemory:
    """A uint8 tensor in another process's GPU memory, as a CUDA IPC handle.

    `rebuild_args` are the arguments of `torch.multiprocessing.reductions.rebuild_cuda_tensor` with the device's UUID
    instead of its index, as SGLang's `monkey_patch_torch_reductions` expects: device indices differ between processes.
    """

    rebuild_args: tuple[Any, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class BucketHandle:
    """A filled bucket of the sender. Valid until `load_bucket` returns.

    Attributes:
        index: position in the update, from 0.
        memory: where the tensors are; their bytes, for an adapter that is sent with a link.
    """

    index: int
    entries: tuple[TensorEntry, ...]
    memory: HostMemory | CudaMemory | bytes


class HostArena:
    """A memfd: shared memory without a name, freed when its last user exits, however it exits.

    Other processes of the same user and PID namespace open it as `/proc/<pid>/fd/<n>` while this process is alive.
    """

    def __init__(self, num_bytes: int) -> None:
        # Linux grants any size and kills a process, not always this one, when the pages are touched.
        available = _available_bytes()
        if num_bytes > available:
            raise RuntimeError(
                f"a bucket needs {num_bytes / 1e9:.3g} GB of shared memory, {available / 1e9:.3g} GB are available; "
                f"reduce bucket_bytes (a bucket is at least as large as the largest tensor)"
            )
        self._fd = os.memfd_create("tidemill-weights")
        try:
            os.ftruncate(self._fd, num_bytes)
            self.data = torch.from_file(f"/proc/self/fd/{self._fd}", True, num_bytes, dtype=torch.uint8)
        except (OSError, RuntimeError):
            os.close(self._fd)
            raise

    def publish(self) -> HostMemory:
        path, inode = f"/proc/{os.getpid()}/fd/{self._fd}", os.fstat(self._fd).st_ino
        return HostMemory(path=path, num_bytes=self.data.numel(), inode=inode)

    def close(self) -> None:
        del self.data
        os.close(self._fd)


def _available_bytes() -> int:
    """Return the memory of this machine that is available without swapping."""
    with open("/proc/meminfo") as meminfo:
        fields = dict(line.split(":", 1) for line in meminfo)
    return int(fields["MemAvailable"].split()[0]) * 1024


_DEVICE_ARG = 6  # index of the device in rebuild_cuda_tensor's arguments, as in SGLang's monkey_patch_torch_reductions


class CudaArena:
    """GPU memory that is exported once: the same handle serves every bucket, rank and engine.

    torch counts the receivers of a shared storage to know when the sender may free it. Here the sender keeps the
    storage alive itself and ignores that count, so the handle may be opened any number of times. (Exporting it again
    for each bucket would wrap the storage in one more owner each time.)
    """

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self.data: Tensor = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        _, args = reductions.reduce_tensor(self.data)
        uuid = str(torch.cuda.get_device_properties(self.data.device).uuid)
        self._memory = CudaMemory(rebuild_args=(*args[:_DEVICE_ARG], uuid, *args[_DEVICE_ARG + 1 :]))

    def publish(self) -> CudaMemory:
        torch.cuda.current_stream(self.data.device).synchronize()
        return self._memory

    def close(self) -> None:
        del self.data


def new_arena(device: torch.device, num_bytes: int) -> HostArena | DeviceArena:
    """Return an arena of `num_bytes` on `device`, for engines with the tidemill loader."""
    return DeviceArena(num_bytes, device) if _is_gpu(device) else HostArena(num_bytes)


def new_stock_arena(device: torch.device, num_bytes: int) -> HostArena | CudaArena:
    """Return an arena of `num_bytes` on `device` that stock SGLang can open."""
    return CudaArena(num_bytes, device) if _is_gpu(device) else HostArena(num_bytes)


def _is_gpu(device: torch.device) -> bool:
    if device.type not in ("cpu", "cuda"):
        raise ValueError(
            f"device must be cpu or cuda, got {device}; pass device='cpu' to copy the tensors to host memory first"
        )
    return device.type == "cuda"


class MappedMemories:
    """Open mappings of the trainer's memory.

    Args:
        device: device of the engine rank. Memory of other GPUs of this machine is mapped into it.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._open: dict[tuple[str | int, int], Tensor | ImportedMemory] = {}

    def keep(self, memories: Iterable[Memory]) -> None:
        """Unmap all memories but these. Host memory stays mapped as long as a tensor refers to it."""
        for key in self._open.keys() - {_key(memory) for memory in memories}:
            mapping = self._open.pop(key)
            if not isinstance(mapping, Tensor):
                mapping.close()

    def block(self, memory: Memory) -> Tensor | int:
        """Return host memory, uint8 [num_bytes], read-only; or the address of GPU memory in this process.

        The first call maps it.
        """
        key = _key(memory)
        if key not in self._open:
            self._open[key] = self._map(memory)
        mapping = self._open[key]
        return mapping if isinstance(mapping, Tensor) else mapping.address

    def _map(self, memory: Memory) -> Tensor | ImportedMemory:
        if isinstance(memory, HostMemory):
            os.close(open_file(memory.path, memory.inode, os.O_RDONLY))
            # A private mapping neither writes to nor grows the file; unwritten pages are shared with the trainer.
            return torch.from_file(memory.path, False, memory.num_bytes, dtype=torch.uint8)
        if self._device.type == "cpu":
            raise RuntimeError("an engine on a CPU cannot read GPU memory; pass device='cpu' to WeightUpdater")
        return ImportedMemory(memory, self._device)


def _key(memory: Memory) -> tuple[str | int, int]:
    return (memory.path, memory.inode) if isinstance(memory, HostMemory) else (memory.pid, memory.buffer_id)


def open_file(path: str, inode: int, flags: int) -> int:
    """Return a new descriptor of a memfd of the trainer.

    Raises:
        RuntimeError: `path` does not exist, or is another file by now.
    """
    try:
        fd = os.open(path, flags)
    except OSError as error:
        raise RuntimeError(
            f"cannot open the trainer's memory {path} ({error.strerror}): engine and trainer must run on one "
            f"machine, in one PID namespace and as one user, and the trainer must be alive; for engines on other "
            f"machines pass link=GroupLink(...) to WeightUpdater"
        ) from error
    if os.fstat(fd).st_ino != inode:
        os.close(fd)
        raise RuntimeError(
            f"the trainer's memory {path} is closed (its file descriptor was reused): the WeightUpdater was closed, or "
            f"trainer and engine are in different PID namespaces; call update() again, or use link=GroupLink(...)"
        )
    return fd
