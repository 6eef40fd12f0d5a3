"""The engine rank's side of a link: receives what it cannot map."""

import hashlib
import secrets
from collections.abc import Callable

import torch
from torch import Tensor

from tidemill_weight_update.control.board import can_map
from tidemill_weight_update.control.descriptor import BucketDescriptor
from tidemill_weight_update.control.mailbox import Mailbox, ReaderState, Text
from tidemill_weight_update.memory import HostMemory
from tidemill_weight_update.plan.plan import CopyPlan
from tidemill_weight_update.remote.group_link import StoreBoard, wire_name
from tidemill_weight_update.remote.wire import ENGINE, Wire, WireError, pack_descriptor, parts_of, parts_to_json


def open_mailbox(board: StoreBoard, device: torch.device, timeout_s: float) -> Mailbox:
    """Return the mailbox of a trainer rank; buckets that it sends arrive on `device`."""
    box = Mailbox(board)
    return box if can_map(*box.owner) else RemoteMailbox(board, device, timeout_s)


class RemoteMailbox(Mailbox):
    """The mailbox of a trainer rank whose memory this process cannot map: it receives the buckets."""

    _reader_state = ReaderState.NONE

    def __init__(self, board: StoreBoard, device: torch.device, timeout_s: float) -> None:
        super().__init__(board)
        self._link = board.link
        self._rank = board.rank
        self._device = device
        self._timeout_s = timeout_s
        self._wire: Wire | None = None
        self._wire_number = secrets.randbits(62)  # a process that replaces this one has another number
        self._packed: dict[int, tuple[Text, int, torch.device]] = {}

    def pack(self, bucket: int, descriptor: BucketDescriptor, plan: CopyPlan) -> BucketDescriptor:
        """Return the descriptor of a bucket, reduced to what `plan` reads of it and packed together."""
        device = self._device  # NCCL transfers GPU memory, gloo host memory
        if isinstance(descriptor.memories[0], HostMemory):
            device = torch.device("cpu")
        elif device.type == "cpu":
            raise RuntimeError("an engine on a CPU cannot receive GPU memory; pass device='cpu' to WeightUpdater")
        parts = parts_of(descriptor, plan)
        text = parts_to_json(parts)
        number = int.from_bytes(hashlib.blake2b(text, digest_size=7).digest())
        self.board.write("parts", number, text)
        packed, num_bytes = pack_descriptor(descriptor, parts)
        self._packed[bucket] = (number, len(text)), num_bytes, device
        return packed

    def receive(self, sequence: int, receiver: int, bucket: int, check: Callable[[], None]) -> Tensor:
        """Receive the bytes that the descriptor from `pack` describes: uint8."""
        parts, num_bytes, device = self._packed[bucket]
        self.wait_for(sequence, receiver, bucket, self._wire_number, parts)
        data = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        if num_bytes:
            self._receive_into(data, receiver, check)
        return data

    def close(self) -> None:
        self._close_wire()
        super().close()

    def _close_wire(self) -> None:
        """Close the wire. The update fails if it still needs it, and the trainer opens a new link."""
        if self._wire is not None:
            self._wire.close()
            self._wire = None

    def _receive_into(self, data: Tensor, receiver: int, check: Callable[[], None]) -> None:
        try:
            if self._wire is None:
                name = wire_name(self._rank, receiver, self._wire_number)
                self._wire = self._link.connect(name, ENGINE, data.device, self._timeout_s)
            if data.device.type == "cuda":
                torch.cuda.synchronize(data.device)  # see NcclWire
            self._wire.recv(data)
            self._wire.wait(self._timeout_s, check)
        except WireError as error:
            self._close_wire()
            raise RuntimeError(f"the link to trainer rank {self._rank} {error}") from error
        except BaseException:
            self._close_wire()  # a transfer may still be running on it
            raise
