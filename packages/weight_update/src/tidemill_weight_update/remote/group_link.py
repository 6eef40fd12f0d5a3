"""A link to engines on other machines: its address, its store, and the boards in it."""

import socket
import urllib.parse
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Self, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch.distributed import DistError, TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import PrefixStore, Store

from tidemill_weight_update.client import GroupLink
from tidemill_weight_update.control.board import WORDS, Area, LinkError, Record
from tidemill_weight_update.remote.nccl import NcclWire
from tidemill_weight_update.remote.wire import GlooWire, Wire


@dataclass(frozen=True, kw_only=True, slots=True)
class LinkAddress:
    """The address of an open link's store, and the session ID that distinguishes links at the same address."""

    host: str
    port: int
    session: str

    def mailbox_path(self, rank: int) -> str:
        """Return the path by which engine ranks open the mailbox of trainer rank `rank`."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"tidemill-link://{host}:{self.port}/{self.session}/{rank}"

    @classmethod
    def from_path(cls, path: str) -> tuple[Self, int]:
        """Return the link and the trainer rank of a path."""
        parts = urllib.parse.urlsplit(path)
        session, rank = parts.path.strip("/").split("/")
        assert parts.hostname is not None
        assert parts.port is not None
        return cls(host=parts.hostname, port=parts.port, session=session), int(rank)

    def own_address(self) -> str:
        """Return the address of this machine from which the link's host is reached."""
        family, _, _, _, target = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(target)  # sends nothing
            return probe.getsockname()[0]


T = TypeVar("T")

_PART_BYTES = 4 << 20
"""TCPStore closes the connection on a message of more than 8 MiB."""


class LinkStore:
    """One process's connection to the store of a link.

    Attributes:
        address: address of the link. Its session is part of every key: values of another link are never found.
        is_broken: whether an operation failed; further operations would fail too.
    """

    def __init__(self, store: Store, address: LinkAddress) -> None:
        self._store: Store | None = PrefixStore(address.session, store)
        self.address = address
        self.is_broken = False

    def call(self, action: Callable[[Store], T]) -> T:
        if self._store is None:
            raise LinkError("this link is closed; create another WeightUpdater")
        try:
            return action(self._store)
        except DistError as error:
            self.is_broken = True
            raise LinkError(f"the store of the link does not respond (is trainer rank 0 alive?): {error}") from error

    def connect(self, name: str, rank: int, device: torch.device, timeout_s: float) -> Wire:
        """Return the wire of that name once both sides have connected: gloo for host memory, NCCL for GPU memory.

        Raises:
            LinkError: the link is closed.
            WireError: the other side did not connect, or the store does not respond.
        """
        if device.type == "cuda":  # NCCL selects the address by its own settings (NCCL_SOCKET_IFNAME)
            return self.call(lambda store: NcclWire(store, name, rank, device, timeout_s))
        own_address = self.address.own_address()
        return self.call(lambda store: GlooWire(store, name, rank, own_address, timeout_s))

    def close(self) -> None:
        """Release the connection, even if the traceback of an error keeps this object."""
        self._store = None


class StoreBoard:
    """The board of trainer rank `rank`. A record is one value, so its words are written and read at once."""

    def __init__(self, link: LinkStore, path: str, rank: int) -> None:
        self.path = path
        self.link = link
        self.rank = rank

    def make_room(self, num_receivers: int) -> None:
        """Write the initial values of all records, before anybody reads them: a store waits for a missing key."""
        keys = [self._key("trainer", 0)]
        keys += [self._key(record, row) for record in ("reader", "report", "excluded") for row in range(num_receivers)]
        self.link.call(lambda store: store.multi_set(keys, [_words()] * len(keys)))  # type: ignore[list-item]

    def put(self, record: Record, row: int, *words: int) -> None:
        self.link.call(lambda store: store.set(self._key(record, row), _words(*words)))  # type: ignore[arg-type]

    def get(self, record: Record, row: int) -> list[int]:
        return np.frombuffer(self.link.call(lambda store: store.get(self._key(record, row))), "<i8").tolist()

    def get_rows(self, record: Record, num_rows: int) -> list[list[int]]:
        keys = [self._key(record, row) for row in range(num_rows)]
        return [np.frombuffer(words, "<i8").tolist() for words in self.link.call(lambda store: store.multi_get(keys))]

    def write(self, area: Area, at: int, data: bytes | NDArray[np.int64]) -> None:
        value = data if isinstance(data, bytes) else data.astype("<i8").tobytes()
        for index, start in enumerate(range(0, len(value), _PART_BYTES)):
            key, part = self._key(area, at, index), value[start : start + _PART_BYTES]
            self.link.call(lambda store, key=key, part=part: store.set(key, part))  # type: ignore[arg-type]

    def read(self, area: Area, at: int, num_bytes: int) -> bytes:
        keys = [self._key(area, at, index) for index in range(-(-num_bytes // _PART_BYTES))]
        value = self.link.call(lambda store: b"".join(map(store.get, keys)))
        if len(value) != num_bytes:
            raise LinkError(f"expected {num_bytes} bytes for {area} {at} in the link's store, got {len(value)}")
        return value

    def is_current(self) -> bool:
        return not self.link.is_broken

    def close(self) -> None:
        """Do nothing: the owner of the store closes it."""

    def _key(self, name: Record | Area, *places: int) -> str:
        return "/".join([name, str(self.rank), *map(str, places)])


def _words(*words: int) -> bytes:
    return np.array([*words, *[0] * (WORDS - len(words))], "<i8").tobytes()


def create_store(link: GroupLink, timeout_s: float) -> TCPStore:
    """Return a store that listens on the link's host and no other address."""
    try:
        family, _, _, _, target = socket.getaddrinfo(link.host, link.port, type=socket.SOCK_STREAM)[0]
        listening = socket.create_server(target[:2], family=family)
    except OSError as error:
        raise RuntimeError(
            f"cannot listen on {link.host} port {link.port} ({error.strerror}): host must be an address of the machine "
            f"of trainer rank 0, and the port must be free"
        ) from error
    port, timeout = listening.getsockname()[1], timedelta(seconds=timeout_s)
    fd = listening.detach()  # TCPStore's own socket would listen on all addresses
    return TCPStore(link.host, port, None, True, timeout, wait_for_workers=False, master_listen_fd=fd)


def open_store(address: LinkAddress, timeout_s: float) -> LinkStore:
    """Return a client of a link's store."""
    try:
        timeout = timedelta(seconds=timeout_s)
        store = TCPStore(address.host, address.port, None, False, timeout, wait_for_workers=False)
    except DistError as error:
        raise LinkError(
            f"cannot reach trainer rank 0 at {address.host} port {address.port}: {error}; check that the trainer is "
            f"running and that GroupLink(host=...) is an address this machine can reach"
        ) from error
    return LinkStore(store, address)


def wire_name(rank: int, row: int, number: int) -> str:
    """Return the name under which a trainer rank and the engine rank in `row` find each other."""
    return f"wire/{rank}/{row}/{number}"
