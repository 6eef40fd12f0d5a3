"""Boards in a torch store, which processes of other machines can reach."""

from collections.abc import Callable
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray
from torch.distributed import DistError
from torch.distributed.distributed_c10d import PrefixStore, Store

from tidemill_weight_update.control.board import NUM_SLOTS, WORDS, Area, LinkError, Record

T = TypeVar("T")

_PART_BYTES = 4 << 20
"""TCPStore closes the connection on a message of more than 8 MiB."""
_KEPT_BYTES = 4096
"""Journal texts up to this length are cached: descriptions of memory, which are read with every bucket."""


class LinkStore:
    """One process's connection to the store of a link.

    Args:
        store: store that holds the values.
        session: random ID of the link, part of every key: values of another link are never found.

    Attributes:
        is_broken: whether an operation failed; further operations would fail too.
    """

    def __init__(self, store: Store, session: str) -> None:
        self._store: Store | None = PrefixStore(session, store)
        self.is_broken = False

    def call(self, action: Callable[[Store], T]) -> T:
        """Return `action(store)`.

        Raises:
            LinkError: the link is closed, or the store does not respond.
        """
        if self._store is None:
            raise LinkError("this link is closed; create another WeightUpdater")
        try:
            return action(self._store)
        except DistError as error:
            self.is_broken = True
            raise LinkError(f"the store of the link does not respond (is trainer rank 0 alive?): {error}") from error

    def close(self) -> None:
        """Release the store, with its connection and port, even if the traceback of an error keeps this object."""
        self._store = None


class StoreBoard:
    """The board of trainer rank `rank`; see `Board`. A record is one value, so its words are written and read at once.

    Args:
        link: store that all processes of the link share.
        path: path by which engine ranks open the board.
        rank: the trainer rank.
    """

    def __init__(self, link: LinkStore, path: str, rank: int) -> None:
        self.path = path
        self._link = link
        self._rank = rank
        self._texts: dict[int, bytes] = {}

    def make_room(self, num_receivers: int) -> None:
        """Write the initial values of all records, before anybody reads them: a store waits for a missing key."""
        rows: dict[Record, int] = {"trainer": 1, "bucket": NUM_SLOTS}
        rows |= {"reader": num_receivers, "report": num_receivers, "excluded": num_receivers}
        keys = [self._key(record, row) for record, num_rows in rows.items() for row in range(num_rows)]
        self._link.call(lambda store: store.multi_set(keys, [_words()] * len(keys)))  # type: ignore[list-item]

    def put(self, record: Record, row: int, *words: int) -> None:
        self._link.call(lambda store: store.set(self._key(record, row), _words(*words)))  # type: ignore[arg-type]

    def get(self, record: Record, row: int) -> list[int]:
        return np.frombuffer(self._link.call(lambda store: store.get(self._key(record, row))), "<i8").tolist()

    def get_rows(self, record: Record, num_rows: int) -> NDArray[np.int64]:
        keys = [self._key(record, row) for row in range(num_rows)]
        return np.frombuffer(b"".join(self._link.call(lambda store: store.multi_get(keys))), "<i8").reshape(-1, WORDS)

    def write(self, area: Area, at: int, data: bytes | NDArray[np.int64]) -> None:
        value = data if isinstance(data, bytes) else data.astype("<i8").tobytes()
        for index, start in enumerate(range(0, len(value), _PART_BYTES)):
            key, part = self._key(area, at, index), value[start : start + _PART_BYTES]
            self._link.call(lambda store, key=key, part=part: store.set(key, part))  # type: ignore[arg-type]

    def read(self, area: Area, at: int, num_bytes: int) -> bytes:
        if area == "journal" and at in self._texts:
            return self._texts[at]
        keys = [self._key(area, at, index) for index in range(-(-num_bytes // _PART_BYTES))]
        value = b"".join(self._link.call(lambda store, key=key: store.get(key)) for key in keys)
        if len(value) != num_bytes:
            raise LinkError(f"expected {num_bytes} bytes for {area} {at} in the link's store, got {len(value)}")
        if area == "journal" and num_bytes <= _KEPT_BYTES:
            self._texts[at] = value
        return value

    def is_current(self) -> bool:
        return not self._link.is_broken

    def close(self) -> None:
        """Do nothing: the owner of the store closes it."""

    def _key(self, name: Record | Area, *places: int) -> str:
        return "/".join([name, str(self._rank), *map(str, places)])


def _words(*words: int) -> bytes:
    return np.array([*words, *[0] * (WORDS - len(words))], "<i8").tobytes()
