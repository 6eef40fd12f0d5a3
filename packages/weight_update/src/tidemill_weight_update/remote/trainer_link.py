"""One trainer rank's end of a link."""

import secrets
from datetime import timedelta

from torch.distributed import DistError, TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import Store

from tidemill_weight_update.control.request import run_token
from tidemill_weight_update.remote.connections import Connections
from tidemill_weight_update.remote.delivery import RemoteReaders, Staging
from tidemill_weight_update.remote.group_link import GroupLink, LinkAddress, listen
from tidemill_weight_update.remote.store_mailbox import StoreMailbox
from tidemill_weight_update.transport.signed_store import LinkError, SignedStore


class TrainerLink:
    """Lives as long as the `WeightUpdater`. Nothing is opened before the first update; `close` forgets all that engines
    were told, and it may be opened again.

    Args:
        link: as the caller wants it.
        rank: of this process among the trainer's ranks; rank 0 hosts the store.
        staging_bytes: memory to pack in.
        timeout_s: longest wait for an answer.
    """

    def __init__(self, link: GroupLink, rank: int, staging_bytes: int, timeout_s: float) -> None:
        self._link = link
        self._rank = rank
        self._staging = Staging(staging_bytes)
        self._timeout_s = timeout_s
        self._server: Store | None = None
        self._identity = (0, 0)
        self._address: LinkAddress | None = None
        self._mailbox: StoreMailbox | None = None
        self._control: StoreMailbox | None = None
        self._connections: Connections | None = None

    def open(self) -> tuple[int, int]:
        """Opens the store, unless it is open; returns its port and session. On rank 0 only.

        Raises:
            RuntimeError: nothing can be opened there.
        """
        if self._server is None:
            with listen(self._link) as socket:
                port = socket.getsockname()[1]
                self._server = TCPStore(
                    *(self._link.host, port, None, True, timedelta(seconds=self._timeout_s)),
                    wait_for_workers=False,
                    master_listen_fd=socket.detach(),  # TCPStore's own listens on all addresses
                )
            self._identity = (port, secrets.randbits(62))
        return self._identity

    def is_at(self, identity: tuple[int, int]) -> bool:
        """Whether this rank's end leads to the store of that port and session."""
        return self._identity == identity

    def connect(self, identity: tuple[int, int], num_receivers: int) -> StoreMailbox:
        """This rank's mailbox, ready for so many engine ranks.

        Args:
            identity: what `open` returned on rank 0.

        Raises:
            RuntimeError: rank 0 cannot be reached.
            TokenError: this process has no run token.
        """
        if self._mailbox is None:
            self._identity = port, session = identity
            self._address = LinkAddress(host=self._link.host, port=port, session=f"{session:x}")
            store = open_store(self._address, self._timeout_s, self._server)
            self._mailbox = StoreMailbox(store, self._address.mailbox_path(self._rank), self._rank)
            path = self._address.mailbox_path(0)
            self._control = self._mailbox if self._rank == 0 else StoreMailbox(store, path, 0)
            self._connections = Connections(self._mailbox, self._address.own_address(), self._timeout_s / 2)
        assert self._connections is not None
        self._mailbox.make_room(num_receivers)
        self._connections.begin()
        return self._mailbox

    def paths(self, num_ranks: int) -> tuple[str, ...]:
        """By which engine ranks open the mailboxes of all trainer ranks."""
        assert self._address is not None, "connect() comes first"
        return tuple(self._address.mailbox_path(rank) for rank in range(num_ranks))

    def readers(self, sequence: int, num_receivers: int) -> RemoteReaders:
        """The engine ranks of an update."""
        assert self._mailbox is not None, "connect() comes first"
        assert self._control is not None
        assert self._connections is not None
        return RemoteReaders(
            *(sequence, self._mailbox, self._control, num_receivers, self._timeout_s),
            connections=self._connections,
            staging=self._staging,
        )

    def close_connections(self) -> None:
        """Ends all wires, so that no engine rank waits for what will not come."""
        if self._connections is not None:
            self._connections.close_all()

    def close(self) -> None:
        self.close_connections()
        self._staging.close()
        self._mailbox = self._control = self._connections = self._server = None
        self._identity = (0, 0)


def open_store(address: LinkAddress, timeout_s: float, server: Store | None = None) -> SignedStore:
    """A link's store, as a client of it.

    Args:
        server: the store itself, in the process that hosts it.

    Raises:
        LinkError: it cannot be reached.
    """
    token = run_token()
    if server is None:
        try:
            timeout = timedelta(seconds=timeout_s)
            server = TCPStore(address.host, address.port, None, False, timeout, wait_for_workers=False)
        except DistError as error:
            raise LinkError(f"cannot reach trainer rank 0 at {address.host} port {address.port}: {error}") from error
    return SignedStore(server, address.session, token)
