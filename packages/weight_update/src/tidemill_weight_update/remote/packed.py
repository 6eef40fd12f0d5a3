"""What one engine rank takes of a descriptor, packed together, so that nothing else has to travel. Pure."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace

from tidemill_weight_update.control.descriptor import BucketDescriptor
from tidemill_weight_update.copy.alignment import aligned
from tidemill_weight_update.copy.table import CopyTable, Shard, build_tables
from tidemill_weight_update.plan.plan import Copy, CopyPlan
from tidemill_weight_update.tensors.box import Box, contiguous_strides

Parts = tuple[tuple[Box, ...], ...]
"""By source of a descriptor: disjoint boxes, each inside one of the descriptor's shards."""


@dataclass(frozen=True, slots=True)
class PackedDescriptor:
    """A descriptor that holds nothing but what somebody wants of another one.

    Attributes:
        descriptor: with the places of the parts in the message, as memory 0.
        num_bytes: of the message.
    """

    descriptor: BucketDescriptor
    num_bytes: int


def parts_of(descriptor: BucketDescriptor, plan: CopyPlan) -> Parts:
    """What the plan takes of the descriptor; of tensors that go through the model's own loader, all there is."""
    taken: dict[str, list[Box]] = {source.name: [] for source in descriptor.sources}
    for copy in plan.copies:
        if copy.name in taken:
            taken[copy.name].append(copy.box)
    parts = []
    for source, shards in zip(descriptor.sources, descriptor.shards, strict=True):
        boxes = [Box.whole(source.shape)] if source.name in plan.through_loader else _disjoint(taken[source.name])
        common = (box.intersect(shard.box) for shard in shards for box in boxes)
        parts.append(tuple(box for box in common if box is not None))
    return tuple(parts)


def _disjoint(boxes: Sequence[Box]) -> list[Box]:
    """The boxes, each once; if two overlap, the smallest box around all of them."""
    distinct = list(dict.fromkeys(boxes))
    if not any(a.intersect(b) for i, a in enumerate(distinct) for b in distinct[:i]):
        return distinct
    dims = range(len(distinct[0].shape))
    start = tuple(min(box.start[dim] for box in distinct) for dim in dims)
    end = [max(box.start[dim] + box.shape[dim] for box in distinct) for dim in dims]
    return [Box(start, tuple(stop - first for stop, first in zip(end, start, strict=True)))]


def parts_to_json(parts: Parts) -> bytes:
    return json.dumps([[[box.start, box.shape] for box in boxes] for boxes in parts], separators=(",", ":")).encode()


def parts_from_json(text: bytes) -> Parts:
    return tuple(tuple(Box(tuple(start), tuple(shape)) for start, shape in boxes) for boxes in json.loads(text))


def pack_descriptor(descriptor: BucketDescriptor, parts: Parts) -> PackedDescriptor:
    """Lays the parts out one after the other. Sender and receiver come to the same result."""
    used = 0
    shards: list[tuple[Shard, ...]] = []
    for source, boxes in zip(descriptor.sources, parts, strict=True):
        places = []
        for box in boxes:
            used = aligned(used)
            places.append(Shard(box, 0, used // source.dtype.itemsize, contiguous_strides(box.shape)))
            used += box.numel * source.dtype.itemsize
        shards.append(tuple(places))
    return PackedDescriptor(replace(descriptor, shards=tuple(shards), memories=()), used)


def pack_tables(descriptor: BucketDescriptor, packed: PackedDescriptor) -> tuple[CopyTable, ...]:
    """The copies from the descriptor's arena (memory 0) into the message (target 0).

    Raises:
        ValueError: the descriptor does not hold what the message wants.
    """
    copies = [
        Copy(source.name, place.box, "message", place.offset, place.strides, source.dtype)
        for source, places in zip(packed.descriptor.sources, packed.descriptor.shards, strict=True)
        for place in places
    ]
    shards = {source.name: held for source, held in zip(descriptor.sources, descriptor.shards, strict=True)}
    return build_tables(copies, descriptor.sources, shards, ("message",))
