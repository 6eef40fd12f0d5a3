"""What trainer ranks send to engine ranks as JSON: requests, and descriptors of buckets (the declaration)."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from tidemill_weight_update.copy.table import Shard
from tidemill_weight_update.cuda_memory import DeviceMemory
from tidemill_weight_update.memory import HostMemory, Memory
from tidemill_weight_update.tensors import Box, SourceSpec


@dataclass(frozen=True, slots=True)
class BucketDescriptor:
    """The contents of one bucket.

    Attributes:
        sources: tensors that the pieces belong to; `shards[i]` are the pieces of `sources[i]`.
        shards: places of the pieces in `memories`.
        memories: the arena that is filled with the bucket, or the allocations of the trainer's own tensors.
        is_in_place: whether the memories are those of the trainer's own tensors.
        first_checksum: index in the mailbox of the checksum of `sources[0]`; those of the other sources follow.
    """

    sources: tuple[SourceSpec, ...]
    shards: tuple[tuple[Shard, ...], ...]
    memories: tuple[Memory, ...]
    is_in_place: bool
    first_checksum: int


def merge_descriptors(descriptors: Sequence[BucketDescriptor]) -> BucketDescriptor:
    """Return one descriptor for buckets whose pieces are read in place. Its `first_checksum` is not valid."""
    sources: dict[SourceSpec, list[Shard]] = {}
    memories: list[Memory] = []
    for descriptor in descriptors:
        for source, shards in zip(descriptor.sources, descriptor.shards, strict=True):
            places = [replace(shard, memory=shard.memory + len(memories)) for shard in shards]
            sources.setdefault(source, []).extend(places)
        memories += descriptor.memories
    shards = tuple(tuple(places) for places in sources.values())
    return BucketDescriptor(tuple(sources), shards, tuple(memories), is_in_place=True, first_checksum=0)


def declaration_to_json(descriptors: Sequence[BucketDescriptor]) -> bytes:
    return json.dumps([_descriptor_to_dict(each) for each in descriptors], separators=(",", ":")).encode()


def declaration_from_json(text: bytes) -> list[BucketDescriptor]:
    return [_descriptor_from_dict(fields) for fields in json.loads(text)]


def _descriptor_to_dict(descriptor: BucketDescriptor) -> dict[str, Any]:
    shards = [
        [[s.box.start, s.box.shape, s.memory, s.offset, s.strides] for s in shards] for shards in descriptor.shards
    ]
    return {
        "sources": [[s.name, s.shape, str(s.dtype).removeprefix("torch.")] for s in descriptor.sources],
        "shards": shards,
        "memories": [asdict(memory) for memory in descriptor.memories],
        "is_in_place": descriptor.is_in_place,
        "first_checksum": descriptor.first_checksum,
    }


def _descriptor_from_dict(fields: dict[str, Any]) -> BucketDescriptor:
    return BucketDescriptor(
        sources=tuple(
            SourceSpec(name, tuple(shape), getattr(torch, dtype)) for name, shape, dtype in fields["sources"]
        ),
        shards=tuple(tuple(_shard_from_json(*item) for item in items) for items in fields["shards"]),
        memories=tuple(HostMemory(**m) if "path" in m else DeviceMemory(**m) for m in fields["memories"]),
        is_in_place=fields["is_in_place"],
        first_checksum=fields["first_checksum"],
    )


def _shard_from_json(start: list[int], shape: list[int], memory: int, offset: int, strides: list[int]) -> Shard:
    return Shard(Box(tuple(start), tuple(shape)), memory, offset, tuple(strides))


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """One update, addressed to the ranks of one engine.

    Attributes:
        sequence: number of the update; the mailboxes carry it too. A late request finds another number there, or that
            the trainer has excluded its ranks.
        mailboxes: paths of the mailboxes of the trainer ranks, in rank order; the engine ranks report in that of rank
            0.
        first_receiver: row of the engine's rank 0 in the mailboxes; rank r has row `first_receiver + r`.
    """

    sequence: int
    mailboxes: tuple[str, ...]
    first_receiver: int
    num_receivers: int
    partial: bool
    timeout_s: float


def request_to_json(request: Request) -> str:
    """Return the text that is sent to the engine."""
    return json.dumps(asdict(request), separators=(",", ":"))


def request_from_json(text: str) -> Request:
    """Return the request inside `text`."""
    try:
        fields = json.loads(text)
        return Request(**fields | {"mailboxes": tuple(fields["mailboxes"])})
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(
            f"expected a weight update of this version of tidemill_weight_update, got {text[:80]!r}; install the same "
            f"version for the trainer and the engine"
        ) from error
