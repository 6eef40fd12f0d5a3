"""Pickles values on the driver, once for all ranks that receive them."""

import io
import pickle
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ray
from ray import cloudpickle
from ray.actor import ActorHandle

from tidemill_dispatch.batch import has_clone
from tidemill_dispatch.sharding import PaddedShard

_UNCHANGED_TYPES = (type(None), bool, int, float, ray.ObjectRef)
# Ray sends arguments up to 100 KB inside the call. Measured on two cores: a small object through the object store
# takes 3 to 4 ms more per call than inside it.
INLINE_BYTES = 64 * 1024


@dataclass(frozen=True, slots=True)
class Packed:
    """A pickled value: the pickle and its out-of-band buffers, which avoid a copy of arrays into the pickle."""

    pickle: Any
    buffers: tuple[Any, ...]

    @property
    def num_bytes(self) -> int:
        return sum(memoryview(part).nbytes for part in (self.pickle, *self.buffers))

    def unpack(self) -> Any:
        """Return the value. Its arrays are read-only views of the received bytes."""
        return pickle.loads(self.pickle, buffers=self.buffers)


class _HoldsRayReferenceError(Exception):
    """The value holds an actor handle or object reference, which Ray has to pickle to count the reference."""


class _Pickler(cloudpickle.CloudPickler):  # pyright: ignore[reportPrivateImportUsage]
    def __init__(self, file: Any, value: Any, buffer_callback: Callable[[pickle.PickleBuffer], Any]):
        super().__init__(file, protocol=5, buffer_callback=buffer_callback)
        self._copied_later = value.rows if isinstance(value, PaddedShard) else value  # by the call that receives it

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, ray.ObjectRef | ActorHandle):
            raise _HoldsRayReferenceError
        if (
            (torch := sys.modules.get("torch")) is not None
            and type(obj) is torch.Tensor
            and _is_plain(obj, torch.strided)
        ):
            # torch pickles the whole storage of a sliced tensor and copies it three times.
            flat = obj.detach().contiguous().as_strided((obj.numel(),), (1,))
            return _tensor_of, (pickle.PickleBuffer(flat.view(torch.uint8).numpy()), obj.dtype, tuple(obj.shape))
        if obj is not self._copied_later and has_clone(obj):  # inside of another value
            reduced = obj.__reduce_ex__(5)
            if isinstance(reduced, tuple) and len(reduced) == 2:  # else it has tensors and arrays of its own
                return _clone_of, reduced
        return super().reducer_override(obj)


def _is_plain(tensor: Any, strided: Any) -> bool:
    special = tensor.is_quantized or tensor.is_conj() or tensor.is_neg() or tensor.is_nested
    simple = tensor.layout == strided and not special
    return tensor.device.type == "cpu" and not tensor.requires_grad and simple and tensor.numel() > 0


def _tensor_of(buffer: Any, dtype: Any, shape: tuple[int, ...]) -> Any:
    """Return a tensor with its own copy: torch has no read-only tensors, and other ranks read the shared bytes."""
    import torch

    copy = bytearray(buffer)
    return torch.frombuffer(copy, dtype=dtype).reshape(shape)


def _clone_of(make: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    return make(*args).clone()


def pack(what: str, value: Any) -> Any:
    """Return `value` in a form that any number of Ray calls can take: itself, a `Packed`, or an object reference.

    Raises:
        TypeError: the value cannot be pickled; the message starts with `what`.
    """
    if isinstance(value, _UNCHANGED_TYPES):
        return value
    file = io.BytesIO()
    buffers: list[pickle.PickleBuffer] = []
    try:
        try:
            _Pickler(file, value, buffers.append).dump(value)
        except _HoldsRayReferenceError:
            return ray.put(value)
    except Exception as error:  # a user's __reduce__ may raise anything
        raise TypeError(
            f"{what} cannot be pickled: {error}; pass plain data, or objects of classes that workers can import"
        ) from error
    packed = Packed(pickle.PickleBuffer(file.getbuffer()), tuple(buffers))
    if packed.num_bytes > INLINE_BYTES:
        return ray.put(packed)
    return Packed(file.getvalue(), tuple(bytes(buffer) for buffer in buffers))


def unpacked(value: Any) -> Any:
    """Return the value of a `Packed`, and other values unchanged."""
    return value.unpack() if isinstance(value, Packed) else value
