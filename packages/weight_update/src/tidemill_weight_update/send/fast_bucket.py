"""A bucket of the fast path, as the trainer rank that sends it sees it."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from tidemill_weight_update.control.descriptor import BucketDescriptor
from tidemill_weight_update.copy.table import CopyTable, Shard, aligned, build_tables
from tidemill_weight_update.memory.handle import DeviceMemory
from tidemill_weight_update.plan.plan import Copy
from tidemill_weight_update.send.modules import by_module, in_buckets
from tidemill_weight_update.tensors.box import Box, contiguous_strides
from tidemill_weight_update.tensors.shards import Piece
from tidemill_weight_update.tensors.spec import SourceSpec


@dataclass(frozen=True, slots=True, eq=False)
class FastBucket:
    """Pieces that one rank sends together.

    Attributes:
        pieces: pieces of tensors.
        places: place of each piece, in the arena or in the descriptor's memories.
        descriptor: descriptor that is written into the journal.
        num_bytes: size in the arena; 0 if the engines read the trainer's own memory.
    """

    pieces: tuple[Piece, ...]
    places: tuple[Shard, ...]
    descriptor: BucketDescriptor
    num_bytes: int

    @property
    def addresses(self) -> list[int]:
        """Addresses of the memories that are read in place; empty if the pieces are copied to the arena."""
        return [memory.address for memory in self.descriptor.memories]

    @property
    def payload_bytes(self) -> int:
        return sum(piece.box.numel * piece.spec.dtype.itemsize for piece in self.pieces)

    def tables(self, device: torch.device) -> tuple[CopyTable, ...]:
        """Return the copies that fill the arena (target 0); memory `i` is that of piece `i`.

        Pieces that are not on `device` count as contiguous: they are copied to it first. If the pieces are read in
        place, the memories are those of the descriptor, and the tables are only valid for reading (checksums).
        """
        copies: list[Copy] = []
        shards: dict[str, list[Shard]] = {}
        dtypes: dict[str, torch.dtype] = {}
        for index, (piece, place) in enumerate(zip(self.pieces, self.places, strict=True)):
            name = piece.spec.name
            dtypes[name] = piece.local.dtype
            packed = contiguous_strides(piece.box.shape)
            if self.descriptor.memories:
                copies.append(Copy(name, piece.box, "arena", 0, packed, piece.spec.dtype))
                shards.setdefault(name, []).append(place)
            else:
                copies.append(Copy(name, piece.box, "arena", place.offset, packed, piece.spec.dtype))
                strides = piece.local.stride() if piece.local.device == device else packed
                shards.setdefault(name, []).append(Shard(piece.box, index, 0, strides))
        sources = [SourceSpec(s.name, s.shape, dtypes.get(s.name, s.dtype)) for s in self.descriptor.sources]
        return build_tables(copies, sources, shards, ("arena",), complete=False)

    def layout(self) -> tuple[object, ...]:
        """Return a key that is equal for buckets with equal `descriptor` and equal `tables()`."""
        own = tuple((p.spec, p.box, p.local.dtype, p.local.stride(), p.local.device) for p in self.pieces)
        return own, self.descriptor.memories, self.places if self.descriptor.memories else self.descriptor.sources


def pack(pieces: Iterable[Piece], bucket_bytes: int) -> Iterator[FastBucket]:
    """Pack pieces into buckets of at most `bucket_bytes`, in their order, reading one module ahead.

    The tensors of one module (`layers.0.self_attn.q_proj.weight`, `...k_proj.weight`) share a bucket if they fit;
    otherwise the first of their buckets announces all of them, so that an engine that combines them records them
    together.
    """
    modules = (_announced(module, bucket_bytes) for module in by_module(pieces, lambda piece: piece.spec.name))
    buckets = in_buckets(
        modules, lambda item: item[0].box.numel * item[0].spec.dtype.itemsize, bucket_bytes, splits_modules=True
    )
    for bucket, _ in buckets:
        yield in_arena([part for part, _ in bucket], [spec for _, specs in bucket for spec in specs])


def _announced(module: Sequence[Piece], max_bytes: int) -> list[tuple[Piece, list[SourceSpec]]]:
    """Return the parts of at most `max_bytes` of a module's pieces, the first one with the specs of all."""
    parts = [part for piece in module for part in split(piece, max_bytes)]
    specs = [piece.spec for piece in module]
    return [(part, [] if index else specs) for index, part in enumerate(parts)]


def in_arena(pieces: Sequence[Piece], announced: Iterable[SourceSpec] = ()) -> FastBucket:
    """Return a bucket whose pieces are copied to the arena one after the other; `announced` lists further tensors."""
    used = 0
    places: list[Shard] = []
    for piece in pieces:
        itemsize = piece.spec.dtype.itemsize
        used = aligned(used)
        places.append(Shard(piece.box, 0, used // itemsize, contiguous_strides(piece.box.shape)))
        used += piece.box.numel * itemsize
    return FastBucket(tuple(pieces), tuple(places), _descriptor(pieces, places, (), announced), used)


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
    return FastBucket(tuple(pieces), tuple(places), _descriptor(pieces, places, memories, ()), 0)


def _descriptor(
    pieces: Sequence[Piece],
    places: Sequence[Shard],
    memories: Sequence[DeviceMemory],
    announced: Iterable[SourceSpec],
) -> BucketDescriptor:
    sources: dict[SourceSpec, list[Shard]] = {spec: [] for spec in announced}
    for piece, place in zip(pieces, places, strict=True):
        sources.setdefault(piece.spec, []).append(place)
    shards = tuple(tuple(places) for places in sources.values())
    return BucketDescriptor(sources=tuple(sources), shards=shards, memories=tuple(memories), first_checksum=0)


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
        parts.append(Piece(spec=piece.spec, box=Box(first, shape), local=piece.local.narrow(dim, start, size)))
    return parts
