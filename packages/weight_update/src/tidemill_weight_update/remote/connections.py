"""The wires of a trainer rank to engine ranks, kept between updates."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tidemill_weight_update.control.descriptor import BucketDescriptor
from tidemill_weight_update.control.mailbox import Mailbox, Place, Reader
from tidemill_weight_update.copy.host import HostCopier
from tidemill_weight_update.copy.table import CopyTable
from tidemill_weight_update.remote.packed import pack_descriptor, pack_tables, parts_from_json
from tidemill_weight_update.remote.store_board import LinkStore
from tidemill_weight_update.transport.connect import connect
from tidemill_weight_update.transport.wire import TRAINER, Wire

if TYPE_CHECKING:
    from tidemill_weight_update.copy.cuda import CudaCopier


class Message:
    """The part of a bucket that is sent to engine ranks which read the same parts."""

    def __init__(self, descriptor: BucketDescriptor, parts: bytes) -> None:
        packed = pack_descriptor(descriptor, parts_from_json(parts))
        self.num_bytes = packed.num_bytes
        self.is_whole_bucket = packed.descriptor.shards == descriptor.shards
        self._tables: tuple[CopyTable, ...] = () if self.is_whole_bucket else pack_tables(descriptor, packed)
        self._gpu_copier: CudaCopier | None = None

    def fill(self, arena: Tensor, place: Tensor) -> None:
        """Copy the parts from the bucket's arena to `place`, uint8 [num_bytes]; on a GPU, queue the copy."""
        if arena.device.type == "cpu":
            HostCopier(self._tables, [place]).run([arena])
            return
        from tidemill_weight_update.copy.cuda import CudaCopier

        if self._gpu_copier is None:
            self._gpu_copier = CudaCopier(self._tables, arena.device)
        self._gpu_copier.run([arena.data_ptr()], [place.data_ptr()])


class Connections:
    """The wires of a trainer rank to the engine ranks of a link, and the messages for them, kept between updates.

    The engine ranks of a link and their rows never change: with other engines, and after a failed update, the trainer
    opens a new link. Only a process that takes the place of an engine rank is noticed here, by the number of its wire.

    Args:
        mailbox: mailbox of this trainer rank.
        rank: this trainer rank.
        store: store through which wires find each other.
        address: address of this machine on which wires listen.
        timeout_s: longest wait for an engine rank to connect.
    """

    def __init__(self, mailbox: Mailbox, rank: int, store: LinkStore, address: str, timeout_s: float) -> None:
        self._mailbox = mailbox
        self._rank = rank
        self._store = store
        self._address = address
        self._timeout_s = timeout_s
        self._wires: dict[int, tuple[int, Wire]] = {}
        self._messages: dict[tuple[Place, Place], Message] = {}

    def message(self, reader: Reader, place: Place, descriptor: BucketDescriptor) -> Message:
        """Return the message for what the engine rank reads of the descriptor at `place`."""
        key = place, reader.parts
        if key not in self._messages:
            self._messages[key] = Message(descriptor, bytes(self._mailbox.board.read("parts", *reader.parts)))
        return self._messages[key]

    def wire(self, row: int, reader: Reader, device: torch.device) -> Wire:
        """Return the wire to the engine rank in `row`; connect if there is none.

        Raises:
            WireError: it could not be connected.
        """
        if row in self._wires and self._wires[row][0] != reader.wire:
            self.drop(row)
        if row not in self._wires:
            name = wire_name(self._rank, row, reader.wire)
            at = TRAINER, device, self._address, self._timeout_s
            self._wires[row] = reader.wire, self._store.call(lambda store: connect(store, name, *at))
        return self._wires[row][1]

    def drop(self, row: int) -> None:
        """Close the wire to an engine rank."""
        if row in self._wires:
            self._wires.pop(row)[1].close()

    def close_all(self) -> None:
        for row in list(self._wires):
            self.drop(row)


def wire_name(rank: int, row: int, number: int) -> str:
    """Return the name under which a trainer rank and the engine rank in `row` find each other."""
    return f"wire/{rank}/{row}/{number}"


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
