"""A torch store that accepts only values signed with the run's token."""

import hashlib
import hmac
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TypeVar

from torch.distributed import DistError
from torch.distributed.distributed_c10d import Store

T = TypeVar("T")

_MAC_BYTES = 32
_PART_BYTES = 4 << 20
"""TCPStore closes the connection on a message of more than 8 MiB."""


class LinkError(RuntimeError):
    """The connection to the store broke, or a value was not signed with the run's token."""


class SignedStore(Store):
    """A store that signs values when they are set and verifies them when they are read; a signature is valid for one
    key only.

    torch's process groups accept it like any other store, so the values they exchange are signed too.

    Args:
        store: store that holds the values.
        session: ID of this link; values signed for another link are rejected.
        token: token of the run.

    Attributes:
        is_broken: whether an operation failed; further operations would fail too.
    """

    def __init__(self, store: Store, session: str, token: str) -> None:
        super().__init__()
        self._store: Store | None = store
        self._prefix = f"{session}/"
        self._key = hmac.digest(token.encode(), f"tidemill link {session}".encode(), "sha256")
        self.is_broken = False

    def set(self, key: str, value: bytes | str) -> None:  # type: ignore[override]
        data = value.encode() if isinstance(value, str) else value
        self._attempt(lambda store: store.set(self._prefix + key, self._mac(key, data) + data))  # type: ignore[arg-type]

    def get(self, key: str) -> bytes:
        """Return the value of a key that is set now or soon.

        Raises:
            LinkError: it is not set in time, or it is not signed with the run's token.
        """
        return self._checked(key, self._attempt(lambda store: store.get(self._prefix + key)))

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:  # type: ignore[override]
        """Return the values of several keys in one round trip."""
        names = [self._prefix + key for key in keys]
        values = self._attempt(lambda store: store.multi_get(names))
        return [self._checked(key, value) for key, value in zip(keys, values, strict=True)]

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:  # type: ignore[override]
        names = [self._prefix + key for key in keys]
        self._attempt(lambda store: store.wait(names) if timeout is None else store.wait(names, timeout))

    def delete_key(self, key: str) -> bool:
        return self._attempt(lambda store: store.delete_key(self._prefix + key))

    def write(self, key: str, value: bytes) -> None:
        """Set a value of any length; the reader must know the length."""
        for index, start in enumerate(range(0, len(value), _PART_BYTES)):
            self.set(f"{key}/{index}", value[start : start + _PART_BYTES])

    def read(self, key: str, num_bytes: int) -> bytes:
        """Return a value that was set by `write`."""
        value = b"".join(self.get(name) for name in self._parts(key, num_bytes))
        if len(value) != num_bytes:
            raise LinkError(f"expected {num_bytes} bytes for key {key!r} of the link's store, got {len(value)}")
        return value

    def drop(self, key: str, num_bytes: int) -> None:
        """Delete a value that was set by `write`."""
        for name in self._parts(key, num_bytes):
            self.delete_key(name)

    def close(self) -> None:
        """Release the store, with its connection and port, even if the traceback of an error keeps this object."""
        self._store = None

    @staticmethod
    def _parts(key: str, num_bytes: int) -> list[str]:
        return [f"{key}/{index}" for index in range(-(-num_bytes // _PART_BYTES))]

    def _mac(self, key: str, data: bytes) -> bytes:
        return hmac.digest(self._key, hashlib.sha256(key.encode()).digest() + data, "sha256")

    def _checked(self, key: str, value: bytes) -> bytes:
        if not hmac.compare_digest(value[:_MAC_BYTES], self._mac(key, value[_MAC_BYTES:])):
            raise LinkError(
                f"refused the value of {key!r} in the link's store: not signed with this run's token; set "
                f"TIDEMILL_WEIGHT_TOKEN to the same value for the trainer and the engines"
            )
        return value[_MAC_BYTES:]

    def _attempt(self, action: Callable[[Store], T]) -> T:
        if self._store is None:
            raise LinkError("this link is closed; create another WeightUpdater")
        try:
            return action(self._store)
        except DistError as error:
            self.is_broken = True
            raise LinkError(f"the store of the link does not respond (is trainer rank 0 alive?): {error}") from error
