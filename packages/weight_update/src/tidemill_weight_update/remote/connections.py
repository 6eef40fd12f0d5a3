"""The wires of a trainer rank to engine ranks, kept between updates."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tidemill_weight_update.control.channel import Place
from tidemill_weight_update.control.descriptor import BucketDescriptor
from tidemill_weight_update.copy.host import HostCopier
from tidemill_weight_update.copy.table import CopyTable
from tidemill_weight_update.remote.packed import pack_descriptor, pack_tables, parts_from_json
from tidemill_weight_update.remote.store_mailbox import ReceiverStatus, StoreMailbox
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


@dataclass(slots=True)
class _Partner:
    generation: int
    wire: Wire | None = None
    parts: dict[int, bytes] = field(default_factory=dict)
    was_used: bool = True


class Connections:
    """Wires to engine ranks and the parts they read, kept from one update to the next.

    An engine rank is identified by a random name, because its row may change between updates. Both sides discard their
    state together: the trainer rank lists the names it remembers in its status, and an engine rank that is not listed,
    or whose wire broke, starts a new generation.

    Args:
        mailbox: mailbox of this trainer rank.
        address: address of this machine on which wires listen.
        timeout_s: longest wait for an engine rank to connect.
    """

    def __init__(self, mailbox: StoreMailbox, address: str, timeout_s: float) -> None:
        self._mailbox = mailbox
        self._address = address
        self._timeout_s = timeout_s
        self._partners: dict[str, _Partner] = {}
        self._messages: dict[tuple[Place, bytes], Message] = {}

    def begin(self) -> None:
        """Drop engine ranks that did not take part in the last update, and publish the remaining names."""
        for name in [name for name, partner in self._partners.items() if not partner.was_used]:
            self.drop(name)
        for partner in self._partners.values():
            partner.was_used = False
        self._mailbox.set_partners(self._partners)

    def message(self, status: ReceiverStatus, place: Place, descriptor: BucketDescriptor) -> Message:
        """Return the message for what the engine rank reads of the descriptor at `place`."""
        partner = self._partner(status)
        number, length = status.parts
        if number not in partner.parts:
            key = f"parts{self._mailbox.rank}/{status.partner}/{status.generation}/{number}"
            partner.parts[number] = self._mailbox.store.read(key, length)
            self._mailbox.store.drop(key, length)
        parts = partner.parts[number]
        if (place, parts) not in self._messages:
            self._messages[place, parts] = Message(descriptor, parts)
        return self._messages[place, parts]

    def wire(self, status: ReceiverStatus, device: torch.device) -> Wire:
        """Return the wire to the engine rank; connect if there is none.

        Raises:
            WireError: it could not be connected.
        """
        partner = self._partner(status)
        if partner.wire is None:
            name = f"wire{self._mailbox.rank}/{status.partner}/{status.generation}"
            partner.wire = connect(self._mailbox.store, name, TRAINER, device, self._address, self._timeout_s)
        return partner.wire

    def drop(self, name: str) -> None:
        """Close the wire to an engine rank and forget it."""
        partner = self._partners.pop(name, None)
        if partner is not None and partner.wire is not None:
            partner.wire.close()

    def close_all(self) -> None:
        for name in list(self._partners):
            self.drop(name)

    def _partner(self, status: ReceiverStatus) -> _Partner:
        partner = self._partners.get(status.partner)
        if partner is None or partner.generation != status.generation:
            self.drop(status.partner)
            partner = self._partners[status.partner] = _Partner(status.generation)
        partner.was_used = True
        return partner


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
