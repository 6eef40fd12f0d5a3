"""The trainer rank's side of a link: the store, wires to engine ranks, and buckets over them."""

import secrets
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta

import torch
from torch import Tensor
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import Store

from tidemill_weight_update.client import GroupLink
from tidemill_weight_update.control.board import PollingWait
from tidemill_weight_update.control.descriptor import BucketDescriptor
from tidemill_weight_update.control.mailbox import Mailbox, Reader, Readers, ReaderState, Text
from tidemill_weight_update.copy.table import aligned
from tidemill_weight_update.memory import Buffer
from tidemill_weight_update.remote.group_link import LinkAddress, LinkStore, StoreBoard, listen, open_store, wire_name
from tidemill_weight_update.remote.wire import TRAINER, Message, Wire, WireError


class Connections:
    """The wires of a trainer rank to the engine ranks of a link, and the messages for them, kept between updates.

    The engine ranks of a link and their rows never change: with other engines, and after a failed update, the trainer
    opens a new link. Only a process that takes the place of an engine rank is noticed here, by the number of its wire.
    """

    def __init__(self, mailbox: Mailbox, rank: int, store: LinkStore, address: str, timeout_s: float) -> None:
        self._mailbox = mailbox
        self._rank = rank
        self._store = store
        self._address = address
        self._timeout_s = timeout_s
        self._wires: dict[int, tuple[int, Wire]] = {}
        self._messages: dict[int, tuple[BucketDescriptor, dict[Text, Message]]] = {}

    def message(self, reader: Reader, bucket: int, descriptor: BucketDescriptor) -> Message:
        """Return the message for what the engine rank reads of a bucket."""
        if bucket not in self._messages or self._messages[bucket][0] is not descriptor:
            self._messages[bucket] = descriptor, {}
        messages = self._messages[bucket][1]
        if reader.parts not in messages:
            parts = bytes(self._mailbox.board.read("parts", *reader.parts))
            messages[reader.parts] = Message(descriptor, parts)
        return messages[reader.parts]

    def wire(self, row: int, reader: Reader, device: torch.device) -> Wire:
        """Return the wire to the engine rank in `row`; connect if there is none."""
        if row in self._wires and self._wires[row][0] != reader.wire:
            self.drop(row)
        if row not in self._wires:
            name = wire_name(self._rank, row, reader.wire)
            wire = self._store.connect(name, TRAINER, device, self._address, self._timeout_s)
            self._wires[row] = reader.wire, wire
        return self._wires[row][1]

    def drop(self, row: int) -> None:
        """Close the wire to an engine rank."""
        if row in self._wires:
            self._wires.pop(row)[1].close()

    def close_all(self) -> None:
        for row in list(self._wires):
            self.drop(row)


def batches(messages: Sequence[Message], max_bytes: int) -> list[list[Message]]:
    """Return the distinct messages in groups of at most `max_bytes` each, or a single message of any size."""
    groups: list[list[Message]] = []
    room = 0
    for message in dict.fromkeys(messages):
        if not groups or message.num_bytes > room:
            groups.append([])
            room = max_bytes
        groups[-1].append(message)
        room -= message.num_bytes
    return groups


class RemoteReaders(Readers):
    """Engine ranks behind a link. Each requests a bucket when it is ready to receive it, and only then is it sent.

    Nothing is sent to a rank that does not wait for it, and every request is served at once, in any order. So no two
    processes wait for each other in a cycle, in whatever order engine ranks visit trainer ranks.

    An engine rank that does nothing for half the time that an engine waits for its trainer is dropped, so that engines
    that wait for the next bucket meanwhile do not time out. The client of its engine reports the failure.
    """

    def __init__(
        self,
        sequence: int,
        own: Mailbox,
        control: Mailbox,
        num_receivers: int,
        timeout_s: float,
        connections: Connections,
        staging: "Staging",
    ) -> None:
        super().__init__(sequence, own, control, num_receivers, timeout_s)
        self.max_wait_s = timeout_s / 2
        self._connections = connections
        self._staging = staging

    def wait(self, num_buckets: int) -> None:
        wait = PollingWait(self.max_wait_s, f"engines to read bucket {num_buckets - 1}", self._drop_exited)
        before: list[int] = []
        while True:
            readers = self._read()
            late = {row for row in self._rows if readers[row].released < num_buckets}
            released = sorted(readers[row].released for row in late)
            if not late:
                return
            if released != before:
                before = released
                wait.progress()
            self._pause(wait, late, readers)

    def deliver(self, bucket: int, descriptor: BucketDescriptor, arena: Tensor | None) -> None:
        if arena is None:
            return
        pending = set(self._rows)
        wait = PollingWait(self.max_wait_s, f"engines to receive bucket {bucket}", self._drop_exited)
        while pending := pending & self._rows:
            readers = self._read()
            waiting = {row: readers[row] for row in pending if readers[row].waits_for(bucket)}
            done = {row for row in pending if readers[row].state == ReaderState.MAPS or readers[row].released > bucket}
            pending -= waiting.keys() | done
            if waiting:
                self._serve(waiting, bucket, descriptor, arena)
                wait.progress()
            elif pending:
                self._pause(wait, pending, readers)

    def _read(self) -> list[Reader]:
        return self._own.readers(self._sequence, self._num_receivers)

    def _pause(self, wait: PollingWait, late: set[int], readers: Sequence[Reader]) -> None:
        try:
            wait.pause()
        except TimeoutError:
            if any(readers[row].state == ReaderState.MAPS for row in late):
                raise  # a reader that maps the arena may still read what would be overwritten
            self._rows.difference_update(late)

    def _serve(self, waiting: Mapping[int, Reader], bucket: int, descriptor: BucketDescriptor, arena: Tensor) -> None:
        messages = {row: self._connections.message(reader, bucket, descriptor) for row, reader in waiting.items()}
        for group in batches([message for message in messages.values() if message.num_bytes], self._staging.num_bytes):
            packed = self._staging.pack(group, arena)
            if arena.device.type == "cuda":
                torch.cuda.synchronize(arena.device)  # see NcclWire
            self._send({row: packed[message] for row, message in messages.items() if message in packed}, waiting)

    def _send(self, packed: Mapping[int, Tensor], waiting: Mapping[int, Reader]) -> None:
        """Send to several engine ranks at once. Drop a rank whose wire breaks; its engine notices that too."""
        sending = {}
        for row, data in packed.items():
            try:
                sending[row] = self._connections.wire(row, waiting[row], data.device)
                sending[row].send(data)
            except WireError:
                self._drop(row)
                sending.pop(row, None)
        deadline = time.monotonic() + self.max_wait_s
        for row, wire in sending.items():
            try:
                wire.wait(max(deadline - time.monotonic(), 0.1), lambda row=row: self._check(row))
            except WireError:
                self._drop(row)

    def _check(self, row: int) -> None:
        self._drop_exited()
        if row not in self._rows:
            raise WireError("was closed because its engine failed")

    def _drop(self, row: int) -> None:
        self._connections.drop(row)
        self._rows.discard(row)


class Staging:
    """Memory in which messages are packed.

    Args:
        num_bytes: size for messages that are sent together; exceeded only if a single message needs more.
    """

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self._buffer = Buffer()

    def pack(self, messages: list[Message], arena: Tensor) -> dict[Message, Tensor]:
        """Pack the messages from a bucket's arena; the tensors (uint8) are valid until the next call."""
        packed = {}
        used = 0
        for message in messages:
            if not message.is_whole_bucket:
                packed[message] = slice(used, used + message.num_bytes)
                used = aligned(used + message.num_bytes)
        memory = self._buffer.room(used, arena.device)
        for message, place in packed.items():
            message.fill(arena, memory[place])
        return {
            message: arena[: message.num_bytes] if message.is_whole_bucket else memory[packed[message]]
            for message in messages
        }


class TrainerLink:
    """The trainer rank's side of a link; it lives as long as the `WeightUpdater`.

    Nothing is opened before the first update. `close` discards all state shared with engines; the link may be opened
    again.

    Args:
        rank: rank of this process among the trainer ranks; rank 0 hosts the store.
        staging_bytes: size of the memory to pack messages in.
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
        """Open the store unless it is open; return its port and session. On rank 0 only."""
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
        self._staging = Staging(self._staging.num_bytes)
        if self._store is not None:
            self._store.close()
        self._store = self._mailbox = self._control = self._connections = self._server = None
        self._identity = (0, 0)
