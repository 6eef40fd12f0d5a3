"""How arguments travel to the ranks: pickled once on the driver, before any rank is called."""

import io
import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray import cloudpickle
from ray.actor import ActorHandle

from tidemill_dispatch.registry import RankCall

_AS_THEY_ARE = (type(None), bool, int, float, ray.ObjectRef)
# Ray carries arguments up to 100 KB inside the call. Measured on two cores: a small object through the store costs
# 3 to 4 ms more per call than inside it.
INLINE_BYTES = 64 * 1024


@dataclass(frozen=True, slots=True)
class Packed:
    """A pickled value: the pickle and its out-of-band buffers, so that arrays are not copied into the pickle."""

    pickle: Any
    buffers: tuple[Any, ...]

    @property
    def num_bytes(self) -> int:
        return sum(memoryview(part).nbytes for part in (self.pickle, *self.buffers))

    def unpack(self) -> Any:
        """Arrays in the value are read-only views of the received bytes."""
        return pickle.loads(self.pickle, buffers=self.buffers)


class _HoldsRayReferenceError(Exception):
    """The value holds an actor handle or an object reference; Ray must pickle it, to count the reference."""


class _Pickler(cloudpickle.CloudPickler):  # pyright: ignore[reportPrivateImportUsage]
    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, ray.ObjectRef | ActorHandle):
            raise _HoldsRayReferenceError
        return super().reducer_override(obj)


def pack(what: str, value: Any) -> Any:
    """Makes `value` ready to be an argument of any number of Ray calls: itself, a `Packed`, or an object reference.

    Raises:
        TypeError: it cannot be pickled; the text starts with `what`.
    """
    if isinstance(value, _AS_THEY_ARE):
        return value
    file = io.BytesIO()
    buffers: list[pickle.PickleBuffer] = []
    try:
        try:
            _Pickler(file, protocol=5, buffer_callback=buffers.append).dump(value)
        except _HoldsRayReferenceError:
            return ray.put(value)
    except Exception as error:  # whatever a user's __reduce__ raises
        raise TypeError(f"{what} cannot be pickled: {error}; pass plain data or what can be imported") from error
    packed = Packed(pickle.PickleBuffer(file.getbuffer()), tuple(buffers))
    if packed.num_bytes > INLINE_BYTES:
        return ray.put(packed)
    return Packed(file.getvalue(), tuple(bytearray(buffer) for buffer in buffers))


def pack_calls(call: str, calls: Sequence[RankCall]) -> list[list[Any]]:
    """Packs each rank's arguments, positional then keyword values, flat.

    Every distinct object is pickled, and stored, once, however many ranks get it. All are packed before any rank is
    called: an argument that cannot be pickled leaves no rank waiting for the others.

    Raises:
        TypeError: an argument cannot be pickled; the text names it.
    """
    packed: dict[int, Any] = {}

    def once(name: str, value: Any) -> Any:
        if id(value) not in packed:
            packed[id(value)] = pack(f"{name} of {call}", value)
        return packed[id(value)]

    return [
        [once(f"argument {i}", value) for i, value in enumerate(args)]
        + [once(f"argument {key!r}", value) for key, value in kwargs.items()]
        for args, kwargs in calls
    ]
