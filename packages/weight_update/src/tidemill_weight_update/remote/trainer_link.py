"""The trainer rank's side of a link."""

import secrets
from datetime import timedelta

from torch.distributed import DistError, TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import Store

from tidemill_weight_update.control.board import LinkError
from tidemill_weight_update.control.mailbox import Mailbox
from tidemill_weight_update.remote.connections import Connections
from tidemill_weight_update.remote.delivery import RemoteReaders, Staging
from tidemill_weight_update.remote.group_link import GroupLink, LinkAddress, listen
from tidemill_weight_update.remote.store_board import LinkStore, StoreBoard


class TrainerLink:
    """The trainer rank's side of a link; it lives as long as the `WeightUpdater`.

    Nothing is opened before the first update. `close` discards all state shared with engines; the link may be opened
    again.

    Args:
        link: the caller's configuration.
        rank: rank of this process among the trainer ranks; rank 0 hosts the store.
        staging_bytes: size of the memory to pack messages in.
        timeout_s: longest wait for a response.
    """

    def __init__(self, link: GroupLink, rank: int, staging_bytes: int, timeout_s: float) -> None:
        self._link = link
        self._rank = rank
        self._staging = Staging(staging_bytes)
        self._timeout_s = timeout_s
        self._server: Store | None = None
        self._identity = (0, 0)
        self._address: LinkAddress | None = None
        self._store: LinkStore | None = None
        self._mailbox: Mailbox | None = None
        self._control: Mailbox | None = None
        self._connections: Connections | None = None

    def open(self) -> tuple[int, int]:
        """Open the store unless it is open; return its port and session. On rank 0 only.

        Raises:
            RuntimeError: the store cannot listen at the configured address.
        """
        if self._server is None:
            with listen(self._link) as socket:
                port = socket.getsockname()[1]
                self._server = TCPStore(
                    self._link.host,
                    port,
                    None,
                    True,
                    timedelta(seconds=self._timeout_s),
                    wait_for_workers=False,
                    master_listen_fd=socket.detach(),  # TCPStore's own socket would listen on all addresses
                )
            self._identity = (port, secrets.randbits(62))
        return self._identity

    def is_at(self, identity: tuple[int, int]) -> bool:
        """Return whether this side is connected to the store of that port and session."""
        return self._identity == identity

    def connect(self, identity: tuple[int, int], num_receivers: int) -> Mailbox:
        """Return this rank's mailbox, with space for `num_receivers` engine ranks.

        Args:
            identity: return value of `open` on rank 0.

        Raises:
            RuntimeError: rank 0 cannot be reached.
        """
        if self._mailbox is None:
            self._identity = port, session = identity
            self._address = LinkAddress(host=self._link.host, port=port, session=f"{session:x}")
            store = self._store = open_store(self._address, self._timeout_s, self._server)
            board = StoreBoard(store, self._address.mailbox_path(self._rank), self._rank)
            board.make_room(num_receivers)
            self._mailbox = self._control = Mailbox(board)
            if self._rank != 0:
                self._control = Mailbox(StoreBoard(store, self._address.mailbox_path(0), 0))
            address = self._address.own_address()
            self._connections = Connections(self._mailbox, self._rank, store, address, self._timeout_s / 2)
        return self._mailbox

    def paths(self, num_ranks: int) -> tuple[str, ...]:
        """Return the paths by which engine ranks open the mailboxes of all trainer ranks."""
        assert self._address is not None, "call connect() first"
        return tuple(self._address.mailbox_path(rank) for rank in range(num_ranks))

    def readers(self, sequence: int, num_receivers: int) -> RemoteReaders:
        """Return the engine ranks of an update."""
        assert self._mailbox is not None, "call connect() first"
        assert self._control is not None
        assert self._connections is not None
        return RemoteReaders(
            sequence,
            self._mailbox,
            self._control,
            num_receivers,
            self._timeout_s,
            connections=self._connections,
            staging=self._staging,
        )

    def close_connections(self) -> None:
        """Close all wires, so that no engine rank waits for data that is not sent."""
        if self._connections is not None:
            self._connections.close_all()

    def close(self) -> None:
        self.close_connections()
        self._staging.close()
        if self._store is not None:
            self._store.close()
        self._store = self._mailbox = self._control = self._connections = self._server = None
        self._identity = (0, 0)


def open_store(address: LinkAddress, timeout_s: float, server: Store | None = None) -> LinkStore:
    """Return a client of a link's store.

    Args:
        server: the store itself, in the process that hosts it.

    Raises:
        LinkError: it cannot be reached.
    """
    if server is None:
        try:
            timeout = timedelta(seconds=timeout_s)
            server = TCPStore(address.host, address.port, None, False, timeout, wait_for_workers=False)
        except DistError as error:
            raise LinkError(
                f"cannot reach trainer rank 0 at {address.host} port {address.port}: {error}; check that the trainer "
                f"is running and that GroupLink(host=...) is an address this machine can reach"
            ) from error
    return LinkStore(server, address.session)
