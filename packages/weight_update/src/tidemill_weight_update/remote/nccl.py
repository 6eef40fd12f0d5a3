"""A wire between the GPUs of two processes, over NCCL, called with ctypes.

torch's ProcessGroupNCCL is not used: its watchdog kills a process whose peer has died, and an engine must survive.
Communicators are non-blocking, so that every call returns and the caller enforces the timeout.
"""

import contextlib
import ctypes
import functools
from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.distributed import DistError
from torch.distributed.distributed_c10d import Store

from tidemill_weight_update.control.board import PollingWait
from tidemill_weight_update.remote.wire import TRAINER, WireError

_SUCCESS, _IN_PROGRESS = 0, 7
_UINT8 = 1
_CONFIG_MAGIC, _CONFIG_VERSION = 0xCAFEBEEF, 21400


class NcclError(RuntimeError):
    """NCCL reported a failure."""


class _UniqueId(ctypes.Structure):
    _fields_ = (("internal", ctypes.c_byte * 128),)


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
    """Return NCCL. Its functions receive everything wider than an int as a ctypes object."""
    try:
        library = ctypes.CDLL("libnccl.so.2")  # already loaded by torch
    except OSError as error:
        raise NcclError(f"cannot load NCCL ({error}); install a torch build with CUDA, which includes it") from error
    library.ncclGetErrorString.restype = library.ncclGetLastError.restype = ctypes.c_char_p
    return library


def _check(code: int) -> None:
    if code in (_SUCCESS, _IN_PROGRESS):
        return
    text = _library().ncclGetErrorString(code).decode()
    detail = (_library().ncclGetLastError(None) or b"").decode().strip()
    raise NcclError(f"NCCL: {text}" + (f" ({detail})" if detail else ""))


@contextlib.contextmanager
def _as_wire_error(what: str) -> Iterator[None]:
    try:
        yield
    except (NcclError, DistError, TimeoutError) as error:
        raise WireError(f"{what} ({error})") from error


class NcclWire:
    """GPU memory over NVLink, InfiniBand or TCP, as NCCL selects. Transfers run on the wire's own stream.

    The caller synchronizes the device before it starts a transfer: kernels of other communicators that run at the same
    time could deadlock with it.
    """

    def __init__(self, store: Store, name: str, rank: int, device: torch.device, timeout_s: float) -> None:
        self._device = device
        self._peer = 1 - rank
        self._stream = torch.cuda.Stream(device)
        self._communicator = ctypes.c_void_p()
        try:
            with _as_wire_error("could not be connected"):
                self._connect(store, f"{name}/nccl", rank)
                self._until(self._is_settled, timeout_s, lambda: None)
        except WireError:
            self.close()
            raise

    def send(self, data: Tensor) -> None:
        self._start(_library().ncclSend, data)

    def recv(self, data: Tensor) -> None:
        self._start(_library().ncclRecv, data)

    def wait(self, timeout_s: float, check: Callable[[], None]) -> None:
        with _as_wire_error("broke"):
            self._until(self._is_settled, timeout_s, check)
            done = self._stream.record_event()
            self._until(lambda: self._is_settled() and done.query(), timeout_s, check)

    def close(self) -> None:
        """Abort running transfers and free everything."""
        communicator, self._communicator = self._communicator, ctypes.c_void_p()
        if communicator:
            with torch.cuda.device(self._device):
                _library().ncclCommAbort(communicator)  # if it fails, the wire is as unusable

    def _connect(self, store: Store, key: str, rank: int) -> None:
        identity = _UniqueId()
        if rank == TRAINER:
            _check(_library().ncclGetUniqueId(ctypes.byref(identity)))
            store.set(key, bytes(identity))  # type: ignore[arg-type]
        else:
            identity = _UniqueId.from_buffer_copy(store.get(key))
        config = _Config(ctypes.sizeof(_Config), _CONFIG_MAGIC, _CONFIG_VERSION, 0)
        communicator = ctypes.byref(self._communicator)
        with torch.cuda.device(self._device):
            _check(_library().ncclCommInitRankConfig(communicator, 2, identity, rank, ctypes.byref(config)))

    def _start(self, transfer: Callable[..., int], data: Tensor) -> None:
        address, num_bytes = ctypes.c_void_p(data.data_ptr()), ctypes.c_size_t(data.numel())
        stream = ctypes.c_void_p(self._stream.cuda_stream)
        with _as_wire_error("broke"), torch.cuda.device(self._device):
            _check(transfer(address, num_bytes, _UINT8, self._peer, self._communicator, stream))

    def _is_settled(self) -> bool:
        """Return whether all started operations are set up, or queued on their stream."""
        code = ctypes.c_int()
        _check(_library().ncclCommGetAsyncError(self._communicator, ctypes.byref(code)))
        _check(code.value)
        return code.value == _SUCCESS

    def _until(self, over: Callable[[], bool], timeout_s: float, check: Callable[[], None]) -> None:
        wait = PollingWait(timeout_s, "the other side", check)
        while not over():
            wait.pause()
