"""The trainer rank's side of a link: the store, wires to engine ranks, and buckets over them."""

import secrets
import time
from collections.abc import Mapping

import torch
from torch import Tensor
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from tidemill_weight_update.client import GroupLink
from tidemill_weight_update.control.board import PollingWait
from tidemill_weight_update.control.descriptor import BucketDescriptor
from tidemill_weight_update.control.mailbox import Mailbox, Reader, Readers, ReaderState, Text
from tidemill_weight_update.remote.group_link import LinkAddress, StoreBoard, create_store, open_store, wire_name
from tidemill_weight_update.remote.wire import TRAINER, Message, Wire, WireError


class TrainerLink:
    """An open link on one trainer rank: its boards, wires to engine ranks and messages, kept between updates.

    The engine ranks of a link and their rows never change: with other engines, and after a failed update, the trainer
    opens a new link. Only a process that takes the place of an engine rank is noticed here, by the number of its wire.

    Args:
        rank: rank of this process among the trainer ranks.
        path: path of the mailbox of rank 0; empty on rank 0, which opens the store.

    Attributes:
        timeout_s: longest time to connect a wire, and for one transfer.
    """

    def __init__(self, link: GroupLink, rank: int, num_receivers: int, timeout_s: float, path: str) -> None:
        self._server: TCPStore | None = None
        if not path:
            self._server = create_store(link, timeout_s)
            session = f"{secrets.randbits(62):x}"
            path = LinkAddress(host=link.host, port=self._server.port, session=session).mailbox_path(0)
        self.path = path
        self.address, _ = LinkAddress.from_path(path)
        self.timeout_s = timeout_s / 2  # before rank 0 excludes engine ranks that wait meanwhile
        self._rank = rank
        self._store = open_store(self.address, timeout_s)
        board = StoreBoard(self._store, self.address.mailbox_path(rank), rank)
        board.make_room(num_receivers)
        self.mailbox = Mailbox(board)
        self.control = self.mailbox if rank == 0 else Mailbox(StoreBoard(self._store, path, 0))
        self._wires: dict[int, tuple[int, Wire]] = {}
        self._messages: dict[int, tuple[BucketDescriptor, dict[Text, Message]]] = {}

    def message(self, reader: Reader, bucket: int, descriptor: BucketDescriptor, device: torch.device) -> Message:
        """Return the message for what the engine rank reads of a bucket in an arena on `device`."""
        if bucket not in self._messages or self._messages[bucket][0] is not descriptor:
            self._messages[bucket] = descriptor, {}
        messages = self._messages[bucket][1]
        if reader.parts not in messages:
            parts = bytes(self.mailbox.board.read("parts", *reader.parts))
            messages[reader.parts] = Message(descriptor, parts, device)
        return messages[reader.parts]

    def wire(self, row: int, reader: Reader, device: torch.device) -> Wire:
        """Return the wire to the engine rank in `row`; connect if there is none."""
        if row not in self._wires or self._wires[row][0] != reader.wire:
            self.drop(row)
            name = wire_name(self._rank, row, reader.wire)
            wire = self._store.connect(name, TRAINER, device, self.timeout_s)
            self._wires[row] = reader.wire, wire
        return self._wires[row][1]

    def drop(self, row: int) -> None:
        """Close the wire to an engine rank."""
        if row in self._wires:
            self._wires.pop(row)[1].close()

    def close_wires(self) -> None:
        """Close all wires, so that no engine rank waits for data that is not sent."""
        for row in list(self._wires):
            self.drop(row)

    def readers(self, sequence: int, num_receivers: int) -> "RemoteReaders":
        return RemoteReaders(sequence, num_receivers, 2 * self.timeout_s, self)

    def close(self) -> None:
        self.close_wires()
        self._store.close()
        self._server = None


class RemoteReaders(Readers):
    """Engine ranks behind a link. Each requests a bucket when it is ready to receive it, and only then is it sent.

    Nothing is sent to a rank that does not wait for it, and every request is served at once, in any order. So no two
    processes wait for each other in a cycle, in whatever order engine ranks visit trainer ranks.
    """

    def __init__(self, sequence: int, num_receivers: int, timeout_s: float, link: TrainerLink) -> None:
        super().__init__(sequence, link.mailbox, link.control, num_receivers, timeout_s)
        self._link = link

    def deliver(self, bucket: int, descriptor: BucketDescriptor, arena: Tensor) -> None:
        pending = set(self._rows)
        wait = PollingWait(self._timeout_s, f"engines to receive bucket {bucket}", self._drop_exited)
        while pending := pending & self._rows:
            readers = self._own.readers(self._sequence, self._num_receivers)
            waiting = {row: readers[row] for row in pending if readers[row].waits_for(bucket)}
            done = {row for row in pending if readers[row].state == ReaderState.MAPS or readers[row].released > bucket}
            pending -= waiting.keys() | done
            if waiting:
                self._send(waiting, bucket, descriptor, arena)
                wait.progress()
            elif pending:
                self._pause(wait, pending)

    def _send(self, waiting: Mapping[int, Reader], bucket: int, descriptor: BucketDescriptor, arena: Tensor) -> None:
        """Send to several engine ranks at once. Drop a rank whose wire breaks; its engine notices that too."""
        messages = {}
        for row, reader in waiting.items():
            message = self._link.message(reader, bucket, descriptor, arena.device)
            if message.num_bytes:
                messages[row] = message
        packed = {message: message.pack(arena) for message in set(messages.values())}
        if arena.device.type == "cuda":
            torch.cuda.synchronize(arena.device)  # see NcclWire
        sending = {}
        for row, message in messages.items():
            try:
                wire = self._link.wire(row, waiting[row], arena.device)
                wire.send(packed[message])
                sending[row] = wire
            except WireError:
                self._drop(row)
        deadline = time.monotonic() + self._link.timeout_s
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
        self._link.drop(row)
        self._rows.discard(row)
