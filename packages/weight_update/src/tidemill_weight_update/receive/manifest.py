"""All tensors of one update, assembled from the bucket descriptors of all trainer ranks."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from tidemill_weight_update.control.descriptor import BucketDescriptor
from tidemill_weight_update.control.mailbox import Mailbox
from tidemill_weight_update.tensors.box import Box, are_disjoint
from tidemill_weight_update.tensors.spec import SourceSpec

DescriptorKey = tuple[Mailbox, tuple[int, int]]
"""A journal and the place (offset, length) of a descriptor in it."""


class Manifest:
    """The tensors of several descriptors, ordered by name.

    Args:
        keys: keys of the descriptors of all trainer ranks.
        descriptors: the descriptors.

    Attributes:
        keys: keys of the descriptors.
        sources: each tensor once, in order of arrival.
        names: sorted names.
        index: position of each name in `names`.
        numel: number of elements of each name, at least 1, int64 [num_names].
        num_in_place: number of descriptors whose pieces are read in place.

    Raises:
        ValueError: trainer ranks disagree about a tensor, or do not send each of its elements exactly once.
    """

    def __init__(self, keys: Sequence[DescriptorKey], descriptors: Sequence[BucketDescriptor]) -> None:
        self.keys = tuple(keys)
        self.sources = _checked_sources(descriptors)
        self.names = sorted(source.name for source in self.sources)
        self.num_in_place = sum(bool(descriptor.memories) for descriptor in descriptors)
        self.numel = np.ones(len(self.names), dtype=np.int64)
        self.index = {name: i for i, name in enumerate(self.names)}
        self._where: dict[int, tuple[BucketDescriptor, NDArray[np.int64]]] = {}
        for source in self.sources:
            self.numel[self.index[source.name]] = max(1, Box.whole(source.shape).numel)

    def sum(self, descriptors: Sequence[BucketDescriptor], values: Sequence[NDArray[np.int64]]) -> NDArray[np.int64]:
        """Add up values of the descriptors' sources by name, one array per descriptor: int64 [num_names]."""
        total = np.zeros(len(self.names), dtype=np.int64)
        for descriptor, line_values in zip(descriptors, values, strict=True):
            if id(descriptor) not in self._where:  # keeps the descriptor alive, so that its id stays unique
                where = np.array([self.index[source.name] for source in descriptor.sources], dtype=np.int64)
                self._where[id(descriptor)] = descriptor, where
            total[self._where[id(descriptor)][1]] += line_values  # a descriptor has each source once
        return total


def _checked_sources(descriptors: Sequence[BucketDescriptor]) -> list[SourceSpec]:
    sources: dict[str, SourceSpec] = {}
    boxes: dict[str, list[Box]] = {}
    for descriptor in descriptors:
        for source, shards in zip(descriptor.sources, descriptor.shards, strict=True):
            if sources.setdefault(source.name, source) != source:
                raise ValueError(
                    f"trainer ranks disagree about {source.name!r}: {sources[source.name]} and {source}; all must pass "
                    f"the same global shape and dtype"
                )
            boxes.setdefault(source.name, []).extend(shard.box for shard in shards)
    for name, held in boxes.items():
        numel, count = Box.whole(sources[name].shape).numel, sum(box.numel for box in held)
        if count != numel or not are_disjoint(held):
            raise ValueError(
                f"{name!r} has {numel} elements, the trainer ranks send {count}"
                f"{'' if are_disjoint(held) else ', some twice'}; "
                f"each must be sent exactly once (for equal copies set LocalShard.replica and num_replicas)"
            )
    return list(sources.values())
