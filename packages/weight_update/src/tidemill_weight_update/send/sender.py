"""The publishing side of the fast path on one trainer rank."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from tidemill_weight_update.control.descriptor import BucketDescriptor, declaration_to_json
from tidemill_weight_update.control.mailbox import Mailbox
from tidemill_weight_update.control.readers import Readers
from tidemill_weight_update.copy.checksum import TensorSums
from tidemill_weight_update.copy.copier import Blocks, Copier
from tidemill_weight_update.memory.arena import Arena, ArenaRing, new_arena
from tidemill_weight_update.memory.handle import Memory
from tidemill_weight_update.send.fast_bucket import FastBucket
from tidemill_weight_update.stats import Stages

Values = Blocks
"""What a bucket is filled with, or read from in place: tensors, or addresses of GPU memory."""


@dataclass(frozen=True, slots=True, eq=False)
class PreparedBucket:
    """A declared bucket, and the means to fill it.

    Attributes:
        descriptor: the descriptor.
        copier: fills the arena, or only reads.
        sums: checksums and non-finite counts of the sources, from the last run of `copier`.
        num_pieces: number of its pieces.
        num_bytes: size in the arena.
        payload_bytes: size of the pieces alone.
    """

    descriptor: BucketDescriptor
    copier: Copier
    sums: TensorSums
    num_pieces: int
    num_bytes: int
    payload_bytes: int


class Sender:
    """Declares buckets in this rank's mailbox, and fills them.

    Args:
        mailbox: mailbox of this rank.
        allow_non_finite: whether infinite and NaN elements may be sent.
    """

    def __init__(self, mailbox: Mailbox, allow_non_finite: bool) -> None:
        self.mailbox = mailbox
        self._allow_non_finite = allow_non_finite
        self._device = torch.device("cpu")
        self._declared = b""
        self._num_tensors = 0
        self._arenas: ArenaRing[Memory] = ArenaRing(2, partial(new_arena, self._device))

    def declare(self, buckets: Sequence[FastBucket], device: torch.device) -> list[PreparedBucket]:
        """Allocate the arenas on `device`, and write the descriptors of all buckets unless they are there."""
        if device != self._device:
            self._device = device
            self._arenas.close()
            self._arenas = ArenaRing(2, partial(new_arena, device))
        self._arenas.rewind()
        # Both halves have the same size: they are used in turn, and small buckets must not shift the turn.
        size = max((bucket.num_bytes for bucket in buckets), default=0)
        num_filled = num_checksums = 0
        halves: list[Memory] = []
        prepared = []
        for bucket in buckets:
            arena = None
            if bucket.num_bytes:
                if num_filled < 2:
                    halves.append(self._arenas.next(size).publish())
                arena = halves[num_filled % 2]
                num_filled += 1
            descriptor = bucket.descriptor(arena, num_checksums)
            num_checksums += len(descriptor.sources)
            prepared.append(
                PreparedBucket(
                    descriptor=descriptor,
                    copier=Copier(bucket.tables(device), device, "target", only_reads=descriptor.is_in_place),
                    sums=TensorSums(len(descriptor.sources), device, counts_non_finite=not self._allow_non_finite),
                    num_pieces=len(bucket.pieces),
                    num_bytes=bucket.num_bytes,
                    payload_bytes=bucket.payload_bytes,
                )
            )
        self._num_tensors = len({source.name for each in prepared for source in each.descriptor.sources})
        text = declaration_to_json([bucket.descriptor for bucket in prepared])
        if text != self._declared:
            self.mailbox.declare(text)
            self._declared = text
        return prepared

    def send(
        self,
        sequence: int,
        buckets: Iterable[tuple[PreparedBucket, Values]],
        readers: Readers,
        stages: Stages,
        started: Callable[[], None],
        finishing: Callable[[Readers], None],
    ) -> tuple[int, int, int]:
        """Publish the declared buckets one after the other, each when its half of the arena is free; return when all
        were read.

        `started` is called as soon as a GPU is busy with the first bucket, so that its work overlaps with the copy.
        `finishing` is called once, while engines copy the last buckets: no engine can finish before it returns.

        Args:
            buckets: all declared buckets, each with its values.

        Returns:
            Numbers of buckets, of tensors with a part in them, and of bytes.

        Raises:
            ValueError: a tensor has non-finite elements; the buckets before it are published.
            TimeoutError: an engine made no progress in time.
        """
        self.mailbox.announce(sequence)
        self._arenas.rewind()
        bucket = num_bytes = 0
        for prepared, values in buckets:
            with stages("load"):
                readers.wait(bucket - 1)
            with stages("fill"):
                arena = self._fill(prepared, values)
            if bucket == 0:
                started()
            with stages("fill"):
                self._finish_filling(prepared, arena)
            bucket += 1
            self.mailbox.publish(sequence, bucket)
            with stages("load"):
                readers.deliver(bucket - 1, prepared.descriptor, None if arena is None else arena.data)
            num_bytes += prepared.payload_bytes
        if bucket == 0:
            started()
        with stages("load"):
            finishing(readers)
        self.mailbox.finish(sequence, bucket)
        with stages("load"):
            readers.wait(bucket)
        return bucket, self._num_tensors, num_bytes

    def close(self) -> None:
        self._arenas.close()
        self.mailbox.close()

    def _fill(self, prepared: PreparedBucket, values: Values) -> Arena[Memory] | None:
        """Start to fill the next arena and return it, or only read (for checksums) what engines read in place."""
        arena = self._arenas.next(prepared.num_bytes) if prepared.num_bytes else None
        prepared.sums.clear()
        prepared.copier.run(
            values, [] if arena is None else [arena.data], prepared.sums.checksums, prepared.sums.non_finite
        )
        prepared.sums.fetch()
        return arena

    def _finish_filling(self, prepared: PreparedBucket, arena: Arena[Memory] | None) -> None:
        """Wait for `_fill`, check its results, and write the checksums."""
        prepared.sums.wait()
        found = [] if self._allow_non_finite else prepared.sums.not_finite()
        if found:
            names = ", ".join(repr(prepared.descriptor.sources[i].name) for i in found[:5])
            raise ValueError(
                f"{len(found)} of the tensors have infinite or NaN elements: {names}; engines that have loaded other "
                f"tensors of this update are paused until an update is complete (to send such tensors, pass "
                f"allow_non_finite=True)"
            )
        if arena is not None:
            arena.publish()
        self.mailbox.write_checksums(prepared.descriptor.first_checksum, prepared.sums.checksums_on_host())
