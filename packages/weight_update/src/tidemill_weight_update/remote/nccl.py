"""A wire between the GPUs of two processes, over NCCL, called with ctypes.

torch's ProcessGroupNCCL is not used: its watchdog kills a process whose peer has died, and an engine must survive.
Communicators are non-blocking, so that every call returns and the caller enforces the timeout.
"""

import ctypes
import functools
from collections.abc import Callable

import torch
from torch import Tensor
from torch.distributed import DistError
from torch.distributed.distributed_c10d import Store

from tidemill_weight_update.control.board import PollingWait
from tidemill_weight_update.remote.wire import TRAINER, WireError

ID_BYTES = 128
SUCCESS, IN_PROGRESS = 0, 7
_UINT8 = 1
_CONFIG_MAGIC, _CONFIG_VERSION = 0xCAFEBEEF, 21400


class NcclError(RuntimeError):
    """NCCL reported a failure."""


class _UniqueId(ctypes.Structure):
    _fields_ = (("internal", ctypes.c_byte * ID_BYTES),)


class _Config(ctypes.Structure):
    """ncclConfig_t of NCCL 2.14, which all later versions accept."""

    _fields_ = (
        ("size", ctypes.c_size_t),
        ("magic", ctypes.c_uint),
        ("version", ctypes.c_uint),
        ("blocking", ctypes.c_int),
    )


@functools.cache
def _library() -> ctypes.CDLL:
    try:
        library = ctypes.CDLL("libnccl.so.2")  # already loaded by torch
    except OSError as error:
        raise NcclError(f"cannot load NCCL ({error}); install a torch build with CUDA, which includes it") from error
    communicator, stream = ctypes.c_void_p, ctypes.c_void_p
    library.ncclGetErrorString.restype = ctypes.c_char_p
    library.ncclGetErrorString.argtypes = [ctypes.c_int]
    library.ncclGetLastError.restype = ctypes.c_char_p
    library.ncclGetLastError.argtypes = [communicator]
    library.ncclGetUniqueId.argtypes = [ctypes.POINTER(_UniqueId)]
    library.ncclCommInitRankConfig.argtypes = [
        ctypes.POINTER(communicator),
        ctypes.c_int,
        _UniqueId,
        ctypes.c_int,
        ctypes.POINTER(_Config),
    ]
    library.ncclCommGetAsyncError.argtypes = [communicator, ctypes.POINTER(ctypes.c_int)]
    for name in ("ncclSend", "ncclRecv"):
        getattr(library, name).argtypes = [
            ctypes.c_void_p,
            ctypes.c_size_t,
            ctypes.c_int,
            ctypes.c_int,
            communicator,
            stream,
        ]
    library.ncclCommAbort.argtypes = [communicator]
    return library


def unique_id() -> bytes:
    """Return an ID that the members of a new communicator share."""
    identity = _UniqueId()
    _check(_library().ncclGetUniqueId(ctypes.byref(identity)), None)
    return bytes(identity)


class Communicator:
    """A communicator of `size` processes. A call only starts an operation; it has finished when `is_settled` returns
    True.

    The rank's device must be current when it is created and used.
    """

    def __init__(self, identity: bytes, rank: int, size: int) -> None:
        self._handle = ctypes.c_void_p()
        config = _Config(ctypes.sizeof(_Config), _CONFIG_MAGIC, _CONFIG_VERSION, 0)
        code = _library().ncclCommInitRankConfig(
            ctypes.byref(self._handle), size, _UniqueId.from_buffer_copy(identity), rank, ctypes.byref(config)
        )
        _check(code, None)

    def is_settled(self) -> bool:
        """Return whether all started operations are set up, or queued on their stream."""
        code = ctypes.c_int()
        _check(_library().ncclCommGetAsyncError(self._handle, ctypes.byref(code)), self._handle)
        _check(code.value, self._handle)
        return code.value == SUCCESS

    def send(self, address: int, num_bytes: int, peer: int, stream: int) -> None:
        _check(_library().ncclSend(address, num_bytes, _UINT8, peer, self._handle, stream), self._handle)

    def recv(self, address: int, num_bytes: int, peer: int, stream: int) -> None:
        _check(_library().ncclRecv(address, num_bytes, _UINT8, peer, self._handle, stream), self._handle)

    def abort(self) -> None:
        """Abort running operations and free everything, independent of the other side."""
        handle, self._handle = self._handle, ctypes.c_void_p()
        if handle:
            _check(_library().ncclCommAbort(handle), None)


def _check(code: int, handle: ctypes.c_void_p | None) -> None:
    if code in (SUCCESS, IN_PROGRESS):
        return
    text = _library().ncclGetErrorString(code).decode()
    detail = (_library().ncclGetLastError(handle) or b"").decode().strip()
    raise NcclError(f"NCCL: {text}" + (f" ({detail})" if detail else ""))


class NcclWire:
    """GPU memory over NVLink, InfiniBand or TCP, as NCCL selects. Transfers run on the wire's own stream.

    The caller synchronizes the device before it starts a transfer: kernels of other communicators that run at the same
    time could deadlock with it.
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
            self._until(self._communicator.is_settled, timeout_s, lambda: None)
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
