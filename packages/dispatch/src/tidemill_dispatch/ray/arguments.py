"""How arguments travel to the ranks."""

from collections.abc import Sequence
from typing import Any

import ray
from ray import cloudpickle

from tidemill_dispatch.registry import RankCall

_INLINE_TYPES = (type(None), bool, int, float, ray.ObjectRef)
_INLINE_CHARS = 4096


def pickled(what: str, value: Any) -> bytes:
    """Pickles `value` as Ray does.

    Raises:
        TypeError: it cannot be pickled; the text starts with `what`.
    """
    try:
        return cloudpickle.dumps(value)  # pyright: ignore[reportPrivateImportUsage]
    except Exception as error:  # whatever a user's __reduce__ raises
        raise TypeError(f"{what} cannot be pickled: {error}; pass plain data or what can be imported") from error


def put_shared(call: str, calls: Sequence[RankCall]) -> list[list[Any]]:
    """Makes each rank's arguments ready to send: positional then keyword values, flat.

    Every distinct object is put into Ray's store once, however many ranks get it; short scalars stay as they are. All
    objects are put before any rank is called: an argument that cannot be pickled leaves no rank waiting for the others.

    Raises:
        TypeError: an argument cannot be pickled; the text names it.
    """
    refs: dict[int, Any] = {}

    def send(name: str, value: Any) -> Any:
        if isinstance(value, _INLINE_TYPES) or (isinstance(value, str | bytes) and len(value) <= _INLINE_CHARS):
            return value
        if id(value) not in refs:
            try:
                refs[id(value)] = ray.put(value)
            except TypeError as error:
                raise TypeError(f"{name} of {call} cannot be pickled: {error}") from error
        return refs[id(value)]

    return [
        [send(f"argument {i}", value) for i, value in enumerate(args)]
        + [send(f"argument {key!r}", value) for key, value in kwargs.items()]
        for args, kwargs in calls
    ]
