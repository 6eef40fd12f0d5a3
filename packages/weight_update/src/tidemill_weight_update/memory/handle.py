"""What travels to an engine instead of the bytes: a small picklable description of a filled bucket."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorEntry:
    """One tensor of a bucket: its name, what the engine sees, and its byte range `[start, end)` in the arena."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    start: int
    end: int

    @property
    def num_bytes(self) -> int:
        return self.end - self.start

    def view(self, arena: Tensor) -> Tensor:
        """The tensor inside `arena` (uint8 [num_bytes]), sharing its memory."""
        return arena[self.start : self.end].view(self.dtype).view(self.shape)


@dataclass(frozen=True, kw_only=True, slots=True)
class HostMemory:
    """Memory of the sender that other processes of this machine and user can map as the file `path`.

    `inode` tells whether it is still there: the number in the path may lead to another file of the sender meanwhile.
    """

    path: str
    num_bytes: int
    inode: int


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceMemory:
    """An allocation of a GPU, as other processes of this machine can map it.

    Attributes:
        pid, buffer_id: of the process that owns it, and a number that no other allocation of that process ever has.
        handle: what CUDA opens it with, 64 bytes.
        address: where it begins in its owner's address space.
        device_uuid: of the GPU.
    """

    pid: int
    buffer_id: int
    handle: bytes
    address: int
    num_bytes: int
    device_uuid: str


Memory = HostMemory | DeviceMemory


@dataclass(frozen=True, kw_only=True, slots=True)
class CudaMemory:
    """A uint8 [num_bytes] tensor in another process's GPU memory, as a CUDA IPC handle.

    `rebuild_args` are the arguments of `torch.multiprocessing.reductions.rebuild_cuda_tensor` with the device's UUID in
    the place of its index, as SGLang's `monkey_patch_torch_reductions` expects: device numbers differ by process.
    """

    device_uuid: str
    num_bytes: int
    rebuild_args: tuple[Any, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class BucketHandle:
    """A filled bucket of the sender. Valid until `load_bucket` returns.

    Attributes:
        index: position in the update, from 0.
        entries: the tensors and their byte ranges in `memory`.
        memory: where the bytes are.
        weight_version: set on the last bucket of an update only: what the engine reports once it has loaded it.
    """

    index: int
    entries: tuple[TensorEntry, ...]
    memory: HostMemory | CudaMemory
    weight_version: str | None
