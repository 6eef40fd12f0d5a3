"""A bucket of the fast path, as the trainer rank that sends it sees it."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from tidemill_weight_update.control.descriptor import BucketDescriptor
from tidemill_weight_update.copy.table import CopyTable, Shard, aligned, build_tables
from tidemill_weight_update.memory.handle import DeviceMemory, Memory
from tidemill_weight_update.plan.plan import Copy
from tidemill_weight_update.tensors.box import Box, SourceSpec, contiguous_strides
from tidemill_weight_update.tensors.shards import Piece


@dataclass(frozen=True, slots=True, eq=False)
class FastBucket:
    """Pieces that one rank sends together.

    Attributes:
        pieces: pieces of tensors.
        places: place of each piece, in the arena or in `memories`.
        memories: allocations that engines read in place; empty if the pieces are copied to an arena.
        num_bytes: size in the arena; 0 if the engines read the trainer's own memory.
    """

    pieces: tuple[Piece, ...]
    places: tuple[Shard, ...]
    memories: tuple[DeviceMemory, ...]
    num_bytes: int

    def descriptor(self, arena: Memory | None, first_checksum: int) -> BucketDescriptor:
        """Return the descriptor of the bucket.

        Args:
            arena: the arena that is filled with it; None if it is read in place.
            first_checksum: see `BucketDescriptor`.
        """
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
        copies: list[Copy] = []
        shards: dict[str, list[Shard]] = {}
        dtypes: dict[str, torch.dtype] = {}
        for index, (piece, place) in enumerate(zip(self.pieces, self.places, strict=True)):
            name = piece.spec.name
            dtypes[name] = piece.local.dtype
            packed = contiguous_strides(piece.box.shape)
            if self.memories:
                copies.append(Copy(name, piece.box, "arena", 0, packed, piece.spec.dtype))
                shards.setdefault(name, []).append(place)
            else:
                copies.append(Copy(name, piece.box, "arena", place.offset, packed, piece.spec.dtype))
                strides = piece.local.stride() if piece.device == device else packed
                shards.setdefault(name, []).append(Shard(piece.box, index, 0, strides))
        specs = dict.fromkeys(piece.spec for piece in self.pieces)
        sources = [SourceSpec(spec.name, spec.shape, dtypes[spec.name]) for spec in specs]
        return build_tables(copies, sources, shards, ("arena",))


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
    used = 0
    places: list[Shard] = []
    for piece in pieces:
        itemsize = piece.spec.dtype.itemsize
        used = aligned(used)
        places.append(Shard(piece.box, 0, used // itemsize, contiguous_strides(piece.box.shape)))
        used += piece.box.numel * itemsize
    return FastBucket(tuple(pieces), tuple(places), (), used)


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
    """Split `piece` along its first dims into parts of at most `max_bytes`."""
    row_bytes = piece.spec.dtype.itemsize
    parts = [piece]
    if piece.box.numel * row_bytes <= max_bytes:
        return parts
    for dim in range(len(piece.box.shape)):
        inner = row_bytes
        for size in piece.box.shape[dim + 1 :]:
            inner *= size
        step = max(1, max_bytes // inner)
        parts = [part for whole in parts for part in _cut(whole, dim, step)]
        if inner <= max_bytes:
            break
    return parts


def _cut(piece: Piece, dim: int, step: int) -> list[Piece]:
    parts = []
    for start in range(0, piece.box.shape[dim], step):
        size = min(step, piece.box.shape[dim] - start)
        first = (*piece.box.start[:dim], piece.box.start[dim] + start, *piece.box.start[dim + 1 :])
        shape = (*piece.box.shape[:dim], size, *piece.box.shape[dim + 1 :])
        local = piece.local.narrow(dim, start, size)
        parts.append(Piece(spec=piece.spec, box=Box(first, shape), local=local, device=piece.device))
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
    from tidemill_weight_update.memory.cuda_memory import NotExportableError, export

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
