"""One process's connection to the store of a link."""

from collections.abc import Callable, Sequence
from typing import TypeVar

from torch.distributed import DistError
from torch.distributed.distributed_c10d import PrefixStore, Store

T = TypeVar("T")

_PART_BYTES = 4 << 20
"""TCPStore closes the connection on a message of more than 8 MiB."""


class LinkError(RuntimeError):
    """The connection to the store broke."""


class LinkStore:
    """The values of one link in a torch store.

    Args:
        store: store that holds the values.
        session: random ID of the link, part of every key: values of another link are never found.

    Attributes:
        is_broken: whether an operation failed; further operations would fail too.
    """

    def __init__(self, store: Store, session: str) -> None:
        self._store: Store | None = PrefixStore(session, store)
        self.is_broken = False

    def raw(self) -> Store:
        """Return the torch store, for process groups.

        Raises:
            LinkError: the link is closed.
        """
        if self._store is None:
            raise LinkError("this link is closed; create another WeightUpdater")
        return self._store

    def set(self, key: str, value: bytes | str) -> None:
        self._attempt(lambda store: store.set(key, value))  # type: ignore[arg-type]

    def get(self, key: str) -> bytes:
        """Return the value of a key that is set now or soon.

        Raises:
            LinkError: it is not set in time.
        """
        return self._attempt(lambda store: store.get(key))

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Return the values of several keys in one round trip."""
        return self._attempt(lambda store: store.multi_get(list(keys)))

    def write(self, key: str, value: bytes) -> None:
        """Set a value of any length; the reader must know the length."""
        for index, start in enumerate(range(0, len(value), _PART_BYTES)):
            self.set(f"{key}/{index}", value[start : start + _PART_BYTES])

    def read(self, key: str, num_bytes: int) -> bytes:
        """Return a value that was set by `write`."""
        parts = range(-(-num_bytes // _PART_BYTES))
        value = b"".join(self.get(f"{key}/{index}") for index in parts)
        if len(value) != num_bytes:
            raise LinkError(f"expected {num_bytes} bytes for key {key!r} of the link's store, got {len(value)}")
        return value

    def close(self) -> None:
        """Release the store, with its connection and port, even if the traceback of an error keeps this object."""
        self._store = None

    def _attempt(self, action: Callable[[Store], T]) -> T:
        try:
            return action(self.raw())
        except DistError as error:
            self.is_broken = True
            raise LinkError(f"the store of the link does not respond (is trainer rank 0 alive?): {error}") from error
