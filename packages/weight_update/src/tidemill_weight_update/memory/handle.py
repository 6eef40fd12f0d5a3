"""Picklable descriptions of memory and of a filled bucket, sent to an engine instead of the bytes."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


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


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceMemory:
    """An allocation of a GPU that other processes of this machine can map.

    Attributes:
        pid: process that owns the allocation.
        buffer_id: number that no other allocation of that process ever has.
        handle: CUDA IPC handle, 64 bytes in hexadecimal.
        address: start of the allocation in the owner's address space.
        num_bytes: size of the allocation.
        device_uuid: UUID of the GPU.
    """

    pid: int
    buffer_id: int
    handle: str
    address: int
    num_bytes: int
    device_uuid: str


Memory = HostMemory | DeviceMemory


@dataclass(frozen=True, kw_only=True, slots=True)
class CudaMemory:
    """A uint8 [num_bytes] tensor in another process's GPU memory, as a CUDA IPC handle.

    `rebuild_args` are the arguments of `torch.multiprocessing.reductions.rebuild_cuda_tensor` with the device's UUID
    instead of its index, as SGLang's `monkey_patch_torch_reductions` expects: device indices differ between processes.
    """

    device_uuid: str
    num_bytes: int
    rebuild_args: tuple[Any, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class BucketHandle:
    """A filled bucket of the sender. Valid until `load_bucket` returns.

    Attributes:
        index: position in the update, from 0.
        entries: tensors and their byte ranges in `memory`.
        memory: memory that holds the bytes.
        weight_version: version the engine reports after loading the bucket; set on the last bucket of an update only.
    """

    index: int
    entries: tuple[TensorEntry, ...]
    memory: HostMemory | CudaMemory
    weight_version: str | None
