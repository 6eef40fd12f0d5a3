"""Buckets of the fast path, and how one trainer rank fills and publishes them."""

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from tidemill_weight_update.control.descriptor import BucketDescriptor, declaration_to_json
from tidemill_weight_update.control.mailbox import Mailbox, Readers
from tidemill_weight_update.copy.checksum import TensorSums
from tidemill_weight_update.copy.copier import Blocks, Copier
from tidemill_weight_update.copy.table import Copy, CopyTable, Shard, aligned, build_tables, in_a_row
from tidemill_weight_update.cuda_memory import DeviceArena, DeviceMemory, NotExportableError, export
from tidemill_weight_update.memory import HostArena, Memory, new_arena
from tidemill_weight_update.stats import Stages
from tidemill_weight_update.tensors import Box, Piece, SourceSpec, contiguous_strides


@dataclass(frozen=True, slots=True, eq=False)
class FastBucket:
    """Pieces that one rank sends together.

    Attributes:
        memories: allocations that engines read in place; empty if the pieces are copied to an arena.
        num_bytes: size in the arena; 0 if the engines read the trainer's own memory.
    """

    pieces: tuple[Piece, ...]
    places: tuple[Shard, ...]
    memories: tuple[DeviceMemory, ...]
    num_bytes: int

    def descriptor(self, arena: Memory | None, first_checksum: int) -> BucketDescriptor:
        sources: dict[SourceSpec, list[Shard]] = {}
        for piece, place in zip(self.pieces, self.places, strict=True):
            sources.setdefault(piece.spec, []).append(place)
        return BucketDescriptor(
            sources=tuple(sources),
            shards=tuple(tuple(places) for places in sources.values()),
            memories=self.memories if arena is None else (arena,),
            is_in_place=arena is None,
            first_checksum=first_checksum,
        )

    @property
    def payload_bytes(self) -> int:
        return sum(piece.box.numel * piece.spec.dtype.itemsize for piece in self.pieces)

    def tables(self, device: torch.device) -> tuple[CopyTable, ...]:
        """Return the copies that fill the arena (target 0); memory `i` is that of piece `i`.

        Pieces that are not on `device` count as contiguous: they are copied to it first. If the pieces are read in
        place, the memories are `memories`, and the tables are only valid for reading (checksums).
        """
        copies: dict[torch.dtype, list[Copy]] = {}
        shards: dict[torch.dtype, dict[str, list[Shard]]] = {}
        for index, (piece, place) in enumerate(zip(self.pieces, self.places, strict=True)):
            name, dtype = piece.spec.name, piece.local.dtype
            packed = contiguous_strides(piece.box.shape)
            if self.memories:
                source, offset = place, 0
            else:
                strides = piece.local.stride() if piece.device == device else packed
                source, offset = Shard(piece.box, index, 0, strides), place.offset
            copies.setdefault(dtype, []).append(Copy(name, piece.box, "arena", offset, packed, piece.spec.dtype))
            shards.setdefault(dtype, {}).setdefault(name, []).append(source)
        specs = dict.fromkeys(piece.spec for piece in self.pieces)
        tables: list[CopyTable] = []
        for dtype, group in copies.items():  # the parts of a tensor may have different dtypes before the cast
            sources = [SourceSpec(spec.name, spec.shape, dtype) for spec in specs]
            tables += build_tables(group, sources, shards[dtype], ("arena",))
        return tuple(tables)


def pack(pieces: Iterable[Piece], bucket_bytes: int) -> Iterator[FastBucket]:
    """Pack pieces into arena buckets of at most `bucket_bytes`, in their order; larger ones are split."""
    bucket: list[Piece] = []
    used = 0
    for part in (part for piece in pieces for part in split(piece, bucket_bytes)):
        num_bytes = part.box.numel * part.spec.dtype.itemsize
        if bucket and aligned(used) + num_bytes > bucket_bytes:
            yield in_arena(bucket)
            bucket, used = [], 0
        bucket.append(part)
        used = aligned(used) + num_bytes
    if bucket:
        yield in_arena(bucket)


def in_arena(pieces: Sequence[Piece]) -> FastBucket:
    """Return a bucket whose pieces are copied to the arena one after the other."""
    places, num_bytes = in_a_row((piece.box, piece.spec.dtype.itemsize) for piece in pieces)
    return FastBucket(tuple(pieces), tuple(places), (), num_bytes)


def in_place(pieces: Sequence[Piece], memories: Sequence[DeviceMemory], memory_of: Sequence[int]) -> FastBucket:
    """Return a bucket whose pieces the engines read in place: piece `i` is in `memories[memory_of[i]]`."""
    places = [
        Shard(
            piece.box,
            memory,
            (piece.local.data_ptr() - memories[memory].address) // piece.spec.dtype.itemsize,
            piece.local.stride(),
        )
        for piece, memory in zip(pieces, memory_of, strict=True)
    ]
    return FastBucket(tuple(pieces), tuple(places), tuple(memories), 0)


def split(piece: Piece, max_bytes: int) -> list[Piece]:
    """Split `piece` along its first dims into parts of at most `max_bytes`, or of single elements."""
    start, shape = piece.box.start, piece.box.shape
    num_bytes = piece.box.numel * piece.spec.dtype.itemsize
    if num_bytes <= max_bytes or piece.box.numel == 1:
        return [piece]
    dim = next(dim for dim, size in enumerate(shape) if size > 1)
    step = max(1, shape[dim] * max_bytes // num_bytes)
    parts = []
    for at in range(0, shape[dim], step):
        size = min(step, shape[dim] - at)
        box = Box((*start[:dim], start[dim] + at, *start[dim + 1 :]), (*shape[:dim], size, *shape[dim + 1 :]))
        parts += split(replace(piece, box=box, local=piece.local.narrow(dim, at, size)), max_bytes)
    return parts


def allocations(
    pieces: Sequence[Piece], device: torch.device
) -> tuple[list[Piece], list[DeviceMemory], list[int], list[Piece]]:
    """Split pieces into those that engines read in place and those that are copied to an arena on `device`.

    A piece is read in place if it is on `device`, is sent in its own dtype, and its allocation can be shared between
    processes (not the case for `expandable_segments` of torch's allocator).

    Returns:
        The pieces to read in place, their allocations, the index of the allocation of each piece, and the other pieces.
        Both lists of pieces have the given order, in which engines load them.
    """
    memories: list[DeviceMemory] = []
    memory_of: dict[int, int] = {}  # index of a piece -> index of its allocation
    for index in sorted(range(len(pieces)), key=lambda index: pieces[index].local.data_ptr()):
        local = pieces[index].local
        if local.device != device or local.dtype != pieces[index].spec.dtype:
            continue
        address = local.data_ptr()
        if not memories or address >= memories[-1].address + memories[-1].num_bytes:
            try:
                memories.append(export(address, device))
            except NotExportableError:
                continue
        memory_of[index] = len(memories) - 1
    stay = [piece for index, piece in enumerate(pieces) if index in memory_of]
    move = [piece for index, piece in enumerate(pieces) if index not in memory_of]
    return stay, memories, [memory_of[index] for index in sorted(memory_of)], move


@dataclass(frozen=True, slots=True, eq=False)
class PreparedBucket:
    """A declared bucket, and the means to fill it.

    Attributes:
        copier: fills the arena, or only reads.
        sums: checksums of the sources, and which are not finite, from the last run of `copier`.
        arena: half of the arena that is filled; None if engines read the pieces in place.
    """

    descriptor: BucketDescriptor
    copier: Copier
    sums: TensorSums
    arena: HostArena | DeviceArena | None
    num_pieces: int


class Sender:
    """Declares buckets in this rank's mailbox, and fills them.

    Attributes:
        counts: numbers of declared buckets, of tensors with a part in them, and of bytes.
    """

    def __init__(self, mailbox: Mailbox, allow_non_finite: bool) -> None:
        self.mailbox = mailbox
        self._allow_non_finite = allow_non_finite
        self._device = torch.device("cpu")
        self._declared = b""
        self.counts = (0, 0, 0)
        self._halves: list[HostArena | DeviceArena] = []

    def declare(self, buckets: Sequence[FastBucket], device: torch.device) -> list[PreparedBucket]:
        """Allocate the arenas on `device`, and write the descriptors of all buckets unless they are there."""
        sizes = [bucket.num_bytes for bucket in buckets if bucket.num_bytes]
        self._allocate(min(2, len(sizes)), max(sizes, default=0), device)
        halves = itertools.cycle([(half, half.publish()) for half in self._halves])
        num_checksums = 0
        prepared = []
        for bucket in buckets:
            arena, memory = next(halves) if bucket.num_bytes else (None, None)
            descriptor = bucket.descriptor(memory, num_checksums)
            num_checksums += len(descriptor.sources)
            prepared.append(
                PreparedBucket(
                    descriptor=descriptor,
                    copier=Copier(bucket.tables(device), device, "target"),
                    sums=TensorSums(len(descriptor.sources), device, finds_non_finite=not self._allow_non_finite),
                    arena=arena,
                    num_pieces=len(bucket.pieces),
                )
            )
        names = {source.name for each in prepared for source in each.descriptor.sources}
        self.counts = len(buckets), len(names), sum(bucket.payload_bytes for bucket in buckets)
        text = declaration_to_json([bucket.descriptor for bucket in prepared])
        if text != self._declared:
            self.mailbox.declare(text)
            self._declared = text
        return prepared

    def send(
        self,
        sequence: int,
        buckets: Iterable[tuple[PreparedBucket, Blocks]],
        readers: Readers,
        stages: Stages,
        started: Callable[[], None],
        finishing: Callable[[], None],
    ) -> None:
        """Publish the declared buckets one after the other, each when its half of the arena is free; return when all
        were read.

        Args:
            buckets: buckets, each with the tensors or addresses that it is filled with, or read from in place.
            started: called as soon as a GPU is busy with the first bucket, so that its work overlaps with the copy.
            finishing: called once, while engines copy the last buckets; no engine can finish before it returns.
        """
        self.mailbox.publish(sequence, 0)
        bucket = 0
        for prepared, values in buckets:
            with stages("load"):
                readers.wait(bucket - 1)
            with stages("fill"):
                self._fill(prepared, values)
            if bucket == 0:
                started()
            with stages("fill"):
                self._finish_filling(prepared)
            bucket += 1
            self.mailbox.publish(sequence, bucket)
            if prepared.arena is not None:
                with stages("load"):
                    readers.deliver(bucket - 1, prepared.descriptor, prepared.arena.data)
        if bucket == 0:
            started()
        with stages("load"):
            finishing()
        self.mailbox.finish(sequence, bucket)
        with stages("load"):
            readers.wait(bucket)

    def close(self) -> None:
        for half in self._halves:
            half.close()
        self._halves = []
        self.mailbox.close()

    def _allocate(self, num_halves: int, num_bytes: int, device: torch.device) -> None:
        """Allocate halves of equal size, unless they are large enough."""
        if device != self._device or any(half.data.numel() < num_bytes for half in self._halves):
            for half in self._halves:  # free them before the next allocation
                half.close()
            self._halves, self._device = [], device
        while len(self._halves) < num_halves:
            self._halves.append(new_arena(device, num_bytes))

    def _fill(self, prepared: PreparedBucket, values: Blocks) -> None:
        """Start to fill the arena, or only read (for checksums) what engines read in place."""
        targets = [] if prepared.arena is None else [prepared.arena.data]
        prepared.sums.clear()
        prepared.copier.run(values, targets, prepared.sums.checksums, prepared.sums.non_finite)
        prepared.sums.fetch()

    def _finish_filling(self, prepared: PreparedBucket) -> None:
        """Wait for `_fill`, check its results, and write the checksums."""
        prepared.sums.wait()
        if found := prepared.sums.not_finite():
            names = ", ".join(repr(prepared.descriptor.sources[i].name) for i in found[:5])
            raise ValueError(
                f"{len(found)} of the tensors have infinite or NaN elements: {names}; engines that have loaded other "
                f"tensors of this update are paused until readmit() (to send such tensors, pass "
                f"allow_non_finite=True)"
            )
        if prepared.arena is not None:
            prepared.arena.publish()
        self.mailbox.write_checksums(prepared.descriptor.first_checksum, prepared.sums.checksums_on_host())
