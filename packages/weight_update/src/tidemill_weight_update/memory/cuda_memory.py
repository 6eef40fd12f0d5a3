"""GPU memory that other processes of this machine map, through CUDA's driver.

torch shares tensors between processes with a protocol of its own, which counts the receivers of each. Here an
allocation is exported once and stays mapped until its owner announces others, so CUDA is called directly. Only what
`cudaMalloc` and `cuMemAlloc` made can be exported: neither the virtual memory of torch's `expandable_segments` nor the
pools of `cudaMallocAsync`.
"""

import contextlib
import ctypes
import functools
import os
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from tidemill_weight_update.memory.handle import DeviceMemory

_BUFFER_ID = 7  # CU_POINTER_ATTRIBUTE_BUFFER_ID
_LAZY_PEER_ACCESS = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS


class NotExportableError(RuntimeError):
    """Memory that CUDA does not share between processes; copy it to a `DeviceArena` and share that."""


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
    """Makes the device's context, the one that torch uses, current in this thread. The driver's calls act on it."""
    with torch.cuda.device(device):
        torch.cuda.current_stream().query()  # in a new thread choosing device 0 alone does nothing
        yield


def _check(code: int, what: str, error: type[RuntimeError] = RuntimeError) -> None:
    if code != 0:
        name = ctypes.c_char_p()
        _driver().cuGetErrorName(code, ctypes.byref(name))
        raise error(f"{what}: {name.value.decode() if name.value else f'CUDA error {code}'}")


def export(address: int, device: torch.device) -> DeviceMemory:
    """The allocation that holds `address`, for other processes. It must not be freed while one of them maps it.

    Args:
        address: in GPU memory of this process; in the middle of an allocation, too.
        device: its GPU.

    Returns:
        The whole allocation, which can be larger than the tensor at `address`. Equal for all addresses in it.

    Raises:
        NotExportableError: CUDA does not share this kind of memory.
    """
    driver = _driver()
    base, num_bytes = ctypes.c_uint64(), ctypes.c_size_t()
    buffer_id, handle = ctypes.c_ulonglong(), _IpcHandle()
    what = f"memory at {address:#x} on {device} cannot be shared with other processes"
    with _current(device):
        _check(
            driver.cuMemGetAddressRange_v2(ctypes.byref(base), ctypes.byref(num_bytes), address),
            f"{what}, it is no GPU memory of this process",
            NotExportableError,
        )
        _check(
            driver.cuPointerGetAttribute(ctypes.byref(buffer_id), _BUFFER_ID, base.value),
            f"{what}, it has no identity",
            NotExportableError,
        )
        _check(
            driver.cuIpcGetMemHandle(ctypes.byref(handle), base.value),
            f"{what}, it does not come from cudaMalloc (torch's expandable_segments and cudaMallocAsync do not use it)",
            NotExportableError,
        )
    return DeviceMemory(
        pid=os.getpid(),
        buffer_id=buffer_id.value,
        handle=bytes(handle),
        address=base.value,
        num_bytes=num_bytes.value,
        device_uuid=str(torch.cuda.get_device_properties(device).uuid),
    )


def are_allocated(memories: Iterable[DeviceMemory], device: torch.device) -> bool:
    """Whether all of these allocations of this process are still there: others at their addresses are not they."""
    driver, buffer_id = _driver(), ctypes.c_ulonglong()
    with _current(device):
        return all(
            driver.cuPointerGetAttribute(ctypes.byref(buffer_id), _BUFFER_ID, memory.address) == 0
            and buffer_id.value == memory.buffer_id
            for memory in memories
        )


def num_freed(device: torch.device) -> int | None:
    """How many allocations torch has given back to CUDA in this process; None: its allocator does not count.

    While that stays the same, what `export` has found can be read, whatever is there now.
    """
    if torch.cuda.get_allocator_backend() != "native":
        return None
    return torch.cuda.memory_stats_as_nested_dict(device)["segment"]["all"]["freed"]


class ImportedMemory:
    """An allocation, as `device` of this process reaches it, wherever it lies: other GPUs' over NVLink or PCIe.

    The memory of another GPU is mapped into the context of `device`; the other GPU gets no context in this process.
    An allocation may be opened any number of times: CUDA counts. Memory of this process itself, which CUDA refuses to
    open, is used where it is, on its own GPU.

    Attributes:
        address: where the allocation begins, in this process. Valid until `close`.

    Raises:
        RuntimeError: CUDA cannot map it: its owner has ended, or the two GPUs cannot reach each other.
    """

    def __init__(self, memory: DeviceMemory, device: torch.device) -> None:
        self._device = device
        self._mapped = memory.pid != os.getpid()
        self.address = memory.address
        if not self._mapped:
            if str(torch.cuda.get_device_properties(device).uuid) != memory.device_uuid:
                raise RuntimeError(f"{device} cannot map memory that this process holds on GPU {memory.device_uuid}")
            return
        address, handle = ctypes.c_uint64(), _IpcHandle.from_buffer_copy(memory.handle)
        with _current(device):
            code = _driver().cuIpcOpenMemHandle_v2(ctypes.byref(address), handle, _LAZY_PEER_ACCESS)
        _check(
            code,
            f"{device} cannot map {memory.num_bytes} bytes of process {memory.pid} on GPU {memory.device_uuid}; "
            f"that process must live, and the GPUs must reach each other (see nvidia-smi topo -p2p r)",
        )
        self.address = address.value

    def close(self) -> None:
        """Ends the mapping, after the work on the current stream; nothing may use it any more. Again: does nothing."""
        if self._mapped:
            self._mapped = False
            with _current(self._device):
                torch.cuda.current_stream().synchronize()
                _check(_driver().cuIpcCloseMemHandle(self.address), "cannot unmap another process's GPU memory")


class DeviceArena:
    """GPU memory to fill and to share, made by `cuMemAlloc` whatever allocator torch uses.

    Attributes:
        data: uint8 [num_bytes].

    Raises:
        RuntimeError: there is not enough memory.
    """

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self._device = device
        address = ctypes.c_uint64()
        with _current(device):
            code = _driver().cuMemAlloc_v2(ctypes.byref(address), num_bytes)
        _check(
            code,
            f"cannot allocate a bucket of {num_bytes} bytes on {device}; choose smaller bucket_bytes, or let torch "
            f"return what it does not use (torch.cuda.empty_cache)",
        )
        self._address = address.value
        self.data: Tensor = torch.as_tensor(_Bytes(self._address, num_bytes), device=device)

    def publish(self) -> DeviceMemory:
        """Waits for what was written on the current stream, and says where the memory is."""
        torch.cuda.current_stream(self._device).synchronize()
        return self._exported

    @functools.cached_property
    def _exported(self) -> DeviceMemory:
        return export(self._address, self._device)

    def close(self) -> None:
        """Frees the memory; other processes must have closed theirs before. Views of `data` end with it."""
        del self.data
        with _current(self._device):
            _check(_driver().cuMemFree_v2(self._address), "cannot free a bucket")


class _Bytes:
    """Memory at an address, as torch and others take it."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }
