"""GPU memory that other processes of this machine map through the CUDA driver.

torch shares tensors between processes with its own protocol, which counts the receivers of each tensor. Here an
allocation is exported once and stays mapped until its owner announces others, so CUDA is called directly. Only memory
from `cudaMalloc` and `cuMemAlloc` can be exported, not the virtual memory of torch's `expandable_segments` and not the
pools of `cudaMallocAsync`.
"""

import contextlib
import ctypes
import functools
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace

import torch
from torch import Tensor

_BUFFER_ID = 7  # CU_POINTER_ATTRIBUTE_BUFFER_ID
_LAZY_PEER_ACCESS = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceMemory:
    """An allocation of a GPU that other processes of this machine can map.

    Attributes:
        buffer_id: number that no other allocation of that process ever has.
        handle: CUDA IPC handle, 64 bytes in hexadecimal.
        address: start of the allocation in the owner's address space.
    """

    pid: int
    buffer_id: int
    handle: str
    address: int
    num_bytes: int
    device_uuid: str


class NotExportableError(RuntimeError):
    """Memory that CUDA cannot share between processes; copy it to a `DeviceArena` and share that."""


class _IpcHandle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_char * 64),)


@functools.cache
def _driver() -> ctypes.CDLL:
    driver = ctypes.CDLL("libcuda.so.1")
    address, size = ctypes.c_uint64, ctypes.c_size_t
    driver.cuMemGetAddressRange_v2.argtypes = [ctypes.POINTER(address), ctypes.POINTER(size), address]
    driver.cuPointerGetAttribute.argtypes = [ctypes.c_void_p, ctypes.c_int, address]
    driver.cuIpcGetMemHandle.argtypes = [ctypes.POINTER(_IpcHandle), address]
    driver.cuIpcOpenMemHandle_v2.argtypes = [ctypes.POINTER(address), _IpcHandle, ctypes.c_uint]
    driver.cuIpcCloseMemHandle.argtypes = [address]
    driver.cuMemAlloc_v2.argtypes = [ctypes.POINTER(address), size]
    driver.cuMemFree_v2.argtypes = [address]
    driver.cuGetErrorName.argtypes = [ctypes.c_int, ctypes.POINTER(ctypes.c_char_p)]
    return driver


@contextlib.contextmanager
def _current(device: torch.device) -> Iterator[None]:
    """Make the device's primary context, which torch uses, current in this thread; driver calls act on it."""
    with torch.cuda.device(device):
        torch.cuda.current_stream().query()  # creates the context: in a new thread selecting device 0 alone does not
        yield


def _check(code: int, what: str, error: type[RuntimeError] = RuntimeError) -> None:
    if code != 0:
        name = ctypes.c_char_p()
        _driver().cuGetErrorName(code, ctypes.byref(name))
        raise error(f"{what}: {name.value.decode() if name.value else f'CUDA error {code}'}")


def export(address: int, device: torch.device) -> DeviceMemory:
    """Return a handle to the allocation that contains `address`. Do not free it while another process maps it.

    Returns:
        The whole allocation, which can be larger than the tensor at `address`. Equal for all addresses in it.
    """
    driver = _driver()
    base, num_bytes = ctypes.c_uint64(), ctypes.c_size_t()
    buffer_id, handle = ctypes.c_ulonglong(), _IpcHandle()
    with _current(device):
        code = (
            driver.cuMemGetAddressRange_v2(ctypes.byref(base), ctypes.byref(num_bytes), address)
            or driver.cuPointerGetAttribute(ctypes.byref(buffer_id), _BUFFER_ID, base.value)
            or driver.cuIpcGetMemHandle(ctypes.byref(handle), base.value)
        )
    _check(
        code,
        f"memory at {address:#x} on {device} cannot be shared with other processes, only this process's memory from "
        f"cudaMalloc can (not that of torch's expandable_segments or cudaMallocAsync)",
        NotExportableError,
    )
    return DeviceMemory(
        pid=os.getpid(),
        buffer_id=buffer_id.value,
        handle=bytes(handle).hex(),
        address=base.value,
        num_bytes=num_bytes.value,
        device_uuid=str(torch.cuda.get_device_properties(device).uuid),
    )


def are_allocated(memories: Iterable[DeviceMemory], device: torch.device) -> bool:
    """Return whether all of these allocations of this process still exist; new allocations at their addresses do not
    count. Takes about 2 us for each.
    """
    driver, buffer_id = _driver(), ctypes.c_ulonglong()
    with _current(device):
        return all(
            driver.cuPointerGetAttribute(ctypes.byref(buffer_id), _BUFFER_ID, memory.address) == 0
            and buffer_id.value == memory.buffer_id
            for memory in memories
        )


def num_freed(device: torch.device) -> int | None:
    """Return how many allocations torch has returned to CUDA in this process; None if its allocator does not count
    them.

    While the number stays the same, the results of `export` stay valid, whatever the memory contains now.
    """
    if torch.cuda.get_allocator_backend() != "native":
        return None
    return torch.cuda.memory_stats_as_nested_dict(device)["segment"]["all"]["freed"]


class ImportedMemory:
    """An allocation of another process, mapped for `device` of this process; memory of other GPUs is read over NVLink
    or PCIe.

    The memory of another GPU is mapped into the context of `device`; no context is created on the other GPU. An
    allocation may be opened any number of times: CUDA counts the openings. Memory of this process itself, which CUDA
    refuses to open, is used directly, on its own GPU.

    Attributes:
        address: start of the allocation in this process. Valid until `close`.
    """

    def __init__(self, memory: DeviceMemory, device: torch.device) -> None:
        self._device = device
        self._mapped = memory.pid != os.getpid()
        self.address = memory.address
        if not self._mapped:
            if str(torch.cuda.get_device_properties(device).uuid) != memory.device_uuid:
                raise RuntimeError(
                    f"{device} cannot map memory of the same process on GPU {memory.device_uuid}; run trainer and "
                    f"engine in different processes, or on one GPU"
                )
            return
        address, handle = ctypes.c_uint64(), _IpcHandle.from_buffer_copy(bytes.fromhex(memory.handle))
        with _current(device):
            code = _driver().cuIpcOpenMemHandle_v2(ctypes.byref(address), handle, _LAZY_PEER_ACCESS)
        _check(
            code,
            f"{device} cannot map {memory.num_bytes} bytes of process {memory.pid} on GPU {memory.device_uuid}; "
            f"that process must be alive, and the GPUs need peer access (see nvidia-smi topo -p2p r)",
        )
        self.address = address.value

    def close(self) -> None:
        """Unmap the allocation after the work on the current stream. Nothing may use it afterwards. A second call does
        nothing.
        """
        if self._mapped:
            self._mapped = False
            with _current(self._device):
                torch.cuda.current_stream().synchronize()
                _check(
                    _driver().cuIpcCloseMemHandle(self.address),
                    f"{self._device} cannot unmap another process's GPU memory",
                )


class DeviceArena:
    """GPU memory to fill and share, allocated by `cuMemAlloc` independent of torch's allocator.

    Attributes:
        data: uint8 [num_bytes].
    """

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self._device = device
        address = ctypes.c_uint64()
        with _current(device):
            code = _driver().cuMemAlloc_v2(ctypes.byref(address), num_bytes)
        _check(
            code,
            f"cannot allocate a bucket of {num_bytes} bytes on {device}; reduce bucket_bytes, or release torch's "
            f"unused memory (torch.cuda.empty_cache)",
        )
        self._address = address.value
        interface = {"shape": (num_bytes,), "typestr": "|u1", "data": (self._address, False), "version": 3}
        self.data: Tensor = torch.as_tensor(SimpleNamespace(__cuda_array_interface__=interface), device=device)
        self._memory = export(self._address, device)

    def publish(self) -> DeviceMemory:
        """Wait for the writes on the current stream, then return the exported memory."""
        torch.cuda.current_stream(self._device).synchronize()
        return self._memory

    def close(self) -> None:
        """Free the memory; other processes must have unmapped it. Views of `data` become invalid."""
        del self.data
        with _current(self._device):
            _check(_driver().cuMemFree_v2(self._address), f"cannot free a bucket on {self._device}")
