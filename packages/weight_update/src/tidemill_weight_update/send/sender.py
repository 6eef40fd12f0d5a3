"""The publishing side of the fast path on one trainer rank."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from tidemill_weight_update.control.descriptor import (
    BucketDescriptor,
    descriptor_to_json,
    listing_to_json,
    memory_to_json,
)
from tidemill_weight_update.control.mailbox import Mailbox, Place
from tidemill_weight_update.control.readers import Readers
from tidemill_weight_update.copy.checksum import TensorSums
from tidemill_weight_update.copy.copier import SendCopier, send_copier
from tidemill_weight_update.memory.arena import Arena, ArenaRing, new_arena
from tidemill_weight_update.memory.handle import Memory
from tidemill_weight_update.send.fast_bucket import FastBucket
from tidemill_weight_update.stages import Stages


@dataclass(frozen=True, slots=True, eq=False)
class PreparedBucket:
    """A bucket whose descriptor is in the journal, and the means to fill it.

    Attributes:
        place: place of the descriptor in the journal.
        descriptor: the descriptor.
        names: names of its sources.
        copier: fills the arena, or only reads.
        sums: checksums and non-finite counts of the sources, from the last run of `copier`.
        pieces: what is copied to the arena, as tensors or addresses; or the addresses of memories that are read in
            place.
        num_bytes: size in the arena.
        payload_bytes: size of the pieces alone.
    """

    place: Place
    descriptor: BucketDescriptor
    names: tuple[str, ...]
    copier: SendCopier
    sums: TensorSums
    pieces: Sequence[Tensor] | Sequence[int]
    num_bytes: int
    payload_bytes: int


MAX_UNUSED_BYTES = 1 << 20
"""Unused descriptions up to this size are always kept."""


class Sender:
    """Publishes bucket descriptors in this rank's mailbox, and the tensors they describe.

    Args:
        mailbox: mailbox of this rank.
        bucket_bytes: maximum size of each half of the arena.
        allow_non_finite: whether infinite and NaN elements may be sent.
    """

    def __init__(self, mailbox: Mailbox, bucket_bytes: int, allow_non_finite: bool) -> None:
        self.mailbox = mailbox
        self._device = torch.device("cpu")
        self._allow_non_finite = allow_non_finite
        self._bucket_bytes = bucket_bytes
        self._room = 0
        self._end = 0
        self._used = 0
        self._num_checksums = 0
        self._written: dict[bytes, Place] = {}
        self._by_layout: dict[object, tuple[Place, BucketDescriptor, SendCopier, TensorSums]] = {}
        self._arenas: ArenaRing[Memory] = ArenaRing(2, partial(new_arena, self._device))

    @property
    def is_mostly_unused(self) -> bool:
        """Whether most of the journal is unused, because the tensors of recent updates had new layouts every time."""
        return self._end > 4 * self._used + MAX_UNUSED_BYTES

    def open(self, sequence: int, buckets: Sequence[PreparedBucket] | None) -> None:
        """Open the update, and announce its buckets if they are known."""
        # Allocate both halves at full size: engines would map an arena that grows twice for a while.
        self._room = self._bucket_bytes if buckets is None else max((bucket.num_bytes for bucket in buckets), default=0)
        listed = None if buckets is None else self._write(listing_to_json([bucket.place for bucket in buckets]))
        self._arenas.rewind()
        self.mailbox.announce(sequence, listed)

    def use(self, device: torch.device) -> None:
        """Set the device of the arena; call it before the first bucket."""
        if device != self._device:
            self._device = device
            self._arenas.close()
            self._arenas = ArenaRing(2, partial(new_arena, device))

    def prepare(self, fast_bucket: FastBucket) -> PreparedBucket:
        """Write the descriptor of a bucket into the journal, unless it is there, and create its copier."""
        layout = fast_bucket.layout()
        if layout not in self._by_layout:
            descriptor = replace(fast_bucket.descriptor, first_checksum=self._num_checksums)
            self._num_checksums += len(descriptor.sources)
            copier = send_copier(
                fast_bucket.tables(self._device), self._device, stays=bool(fast_bucket.descriptor.memories)
            )
            sums = TensorSums(len(descriptor.sources), self._device, counts_non_finite=not self._allow_non_finite)
            self._by_layout[layout] = (self._append(descriptor_to_json(descriptor)), descriptor, copier, sums)
        place, descriptor, copier, sums = self._by_layout[layout]
        return PreparedBucket(
            place=place,
            descriptor=descriptor,
            names=tuple(source.name for source in descriptor.sources),
            copier=copier,
            sums=sums,
            pieces=fast_bucket.addresses or self._pieces(fast_bucket),
            num_bytes=fast_bucket.num_bytes,
            payload_bytes=fast_bucket.payload_bytes,
        )

    def _pieces(self, fast_bucket: FastBucket) -> list[Tensor] | list[int]:
        """Return addresses where they suffice, so that a cached bucket does not keep tensors alive."""
        pieces = [piece.local for piece in fast_bucket.pieces]
        if self._device.type == "cpu" or any(piece.device != self._device for piece in pieces):
            return pieces
        return [piece.data_ptr() for piece in pieces]

    def send(
        self,
        sequence: int,
        buckets: Iterable[PreparedBucket],
        readers: Readers,
        stages: Stages,
        started: Callable[[], None],
        finishing: Callable[[Readers], None],
        is_being_read: bool = False,
    ) -> tuple[int, int, int]:
        """Publish the buckets one after the other, each when its half of the arena is free; return when all were read.

        `started` is called as soon as a GPU is busy with the first bucket, so that its work overlaps with the copy.
        `finishing` is called once, while engines copy the last buckets: no engine can finish before it returns.

        Args:
            is_being_read: whether `fill` was already called for the first bucket, which is read in place.

        Returns:
            Numbers of buckets, of tensors with a part in them, and of bytes.

        Raises:
            ValueError: a tensor has non-finite elements; the buckets before it are published.
            TimeoutError: an engine made no progress in time.
        """
        bucket = num_bytes = self._used = 0
        names: set[str] = set()
        for prepared in buckets:
            with stages("load"):
                readers.wait(bucket - 1)
            with stages("fill"):
                arena = None if is_being_read and bucket == 0 else self.fill(prepared)
            if bucket == 0:
                started()
            with stages("fill"):
                where = self._filled(prepared, arena)
            self.mailbox.publish(sequence, bucket, prepared.place, where)
            with stages("load"):
                readers.deliver(bucket, prepared.place, prepared.descriptor, None if arena is None else arena.data)
            self._used += prepared.place[1]
            num_bytes += prepared.payload_bytes
            names.update(prepared.names)
            bucket += 1
        if bucket == 0:
            started()
        with stages("load"):
            finishing(readers)
        self.mailbox.finish(sequence, bucket)
        with stages("load"):
            readers.wait(bucket)
        return bucket, len(names), num_bytes

    def close(self) -> None:
        self._arenas.close()
        self._by_layout.clear()
        self.mailbox.close()

    def fill(self, prepared: PreparedBucket) -> Arena[Memory] | None:
        """Start to fill the next arena and return it, or only read (for checksums) what engines read in place."""
        arena = self._arenas.next(max(prepared.num_bytes, self._room)) if prepared.num_bytes else None
        prepared.sums.clear()
        prepared.copier.run(
            prepared.pieces, None if arena is None else arena.data, prepared.sums.checksums, prepared.sums.non_finite
        )
        prepared.sums.fetch()
        return arena

    def _filled(self, prepared: PreparedBucket, arena: Arena[Memory] | None) -> Place | None:
        """Wait for `fill`, check its results, and return the place of the arena's description in the journal."""
        prepared.sums.wait()
        found = [] if self._allow_non_finite else prepared.sums.not_finite()
        if found:
            names = ", ".join(repr(prepared.names[i]) for i in found[:5])
            raise ValueError(
                f"{len(found)} of the tensors have infinite or NaN elements: {names}; engines that have loaded other "
                f"tensors of this update are paused until an update is complete (to send such tensors, pass "
                f"allow_non_finite=True)"
            )
        self.mailbox.write_checksums(prepared.descriptor.first_checksum, prepared.sums.checksums_on_host())
        return None if arena is None else self._write(memory_to_json(arena.publish()))

    def _write(self, text: bytes) -> Place:
        if text not in self._written:
            self._written[text] = self._append(text)
        return self._written[text]

    def _append(self, text: bytes) -> Place:
        place = (self._end, len(text))
        self.mailbox.write_journal(self._end, text)
        self._end += len(text)
        return place
