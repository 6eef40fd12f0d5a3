"""Delivery of buckets to engine ranks that cannot map them."""

import time
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from tidemill_weight_update.control.descriptor import BucketDescriptor
from tidemill_weight_update.control.mailbox import Mailbox, Place, Reader, ReaderState
from tidemill_weight_update.control.readers import Readers
from tidemill_weight_update.control.wait import PollingWait
from tidemill_weight_update.copy.alignment import aligned
from tidemill_weight_update.remote.connections import Connections, Message, batches
from tidemill_weight_update.transport.wire import WireError


class RemoteReaders(Readers):
    """Engine ranks behind a link. Each requests a bucket when it is ready to receive it, and only then is it sent.

    Nothing is sent to a rank that does not wait for it, and every request is served at once, in any order. So no two
    processes wait for each other in a cycle, in whatever order engine ranks visit trainer ranks.

    An engine rank that does nothing for half the time that an engine waits for its trainer is dropped, so that engines
    that wait for the next bucket meanwhile do not time out. The client of its engine reports the failure.

    Args:
        sequence: number of the update.
        own: mailbox of this trainer rank.
        control: mailbox of trainer rank 0.
        num_receivers: number of engine ranks.
        timeout_s: longest wait for one of them to make progress.
        connections: wires to the engine ranks.
        staging: memory to pack messages in, kept between updates.
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

    def deliver(self, bucket: int, place: Place, descriptor: BucketDescriptor, arena: Tensor | None) -> None:
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
                self._serve(waiting, place, descriptor, arena)
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

    def _serve(self, waiting: Mapping[int, Reader], place: Place, descriptor: BucketDescriptor, arena: Tensor) -> None:
        messages = {row: self._connections.message(reader, place, descriptor) for row, reader in waiting.items()}
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
        self._memory: Tensor | None = None

    def pack(self, messages: list[Message], arena: Tensor) -> dict[Message, Tensor]:
        """Pack the messages from a bucket's arena; the tensors (uint8) are valid until the next call."""
        packed = {}
        used = 0
        for message in messages:
            if not message.is_whole_bucket:
                packed[message] = slice(used, used + message.num_bytes)
                used = aligned(used + message.num_bytes)
        memory = self._room(used, arena.device)
        for message, place in packed.items():
            message.fill(arena, memory[place])
        return {
            message: arena[: message.num_bytes] if message.is_whole_bucket else memory[packed[message]]
            for message in messages
        }

    def _room(self, num_bytes: int, device: torch.device) -> Tensor:
        memory = self._memory
        if memory is None or memory.numel() < num_bytes or memory.device != device:
            self._memory = None  # free it before the next allocation
            memory = self._memory = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        return memory

    def close(self) -> None:
        self._memory = None
