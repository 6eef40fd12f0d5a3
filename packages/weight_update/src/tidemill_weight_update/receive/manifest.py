"""All that is sent in one update, put together from the lines of all trainer ranks."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from tidemill_weight_update.control.channel import Channel
from tidemill_weight_update.control.descriptor import Line
from tidemill_weight_update.tensors.box import Box, are_disjoint
from tidemill_weight_update.tensors.spec import SourceSpec

LineKey = tuple[Channel, tuple[int, int]]
"""A journal and the place (offset, length) of a line in it."""


class Manifest:
    """The tensors of some lines, in the order of their names.

    Args:
        keys: of the lines of all trainer ranks.
        lines: what stands there.

    Attributes:
        sources: each tensor once, in order of arrival.
        names: sorted.
        index: of each name in `names`.
        numel: of each name, at least 1, int64 [num_names].
        num_in_place: lines whose pieces are read where they are.

    Raises:
        ValueError: trainer ranks disagree about a tensor, or do not send each of its elements exactly once.
    """

    def __init__(self, keys: Sequence[LineKey], lines: Sequence[Line]) -> None:
        self.keys = tuple(keys)
        self.sources = _checked_sources(lines)
        self.names = sorted(source.name for source in self.sources)
        self.num_in_place = sum(bool(line.memories) for line in lines)
        self.numel = np.ones(len(self.names), dtype=np.int64)
        self.index = {name: i for i, name in enumerate(self.names)}
        self._where: dict[int, tuple[Line, NDArray[np.int64]]] = {}
        for source in self.sources:
            self.numel[self.index[source.name]] = max(1, Box.whole(source.shape).numel)

    def sum(self, lines: Sequence[Line], values: Sequence[NDArray[np.int64]]) -> NDArray[np.int64]:
        """Adds up values of the lines' sources, one array for each line, by name: int64 [num_names]."""
        total = np.zeros(len(self.names), dtype=np.int64)
        for line, line_values in zip(lines, values, strict=True):
            if id(line) not in self._where:  # kept with the line, so that no other has its id
                where = np.array([self.index[source.name] for source in line.sources], dtype=np.int64)
                self._where[id(line)] = line, where
            total[self._where[id(line)][1]] += line_values  # a line has each source once
        return total


def _checked_sources(lines: Sequence[Line]) -> list[SourceSpec]:
    sources: dict[str, SourceSpec] = {}
    boxes: dict[str, list[Box]] = {}
    for line in lines:
        for source, shards in zip(line.sources, line.shards, strict=True):
            if sources.setdefault(source.name, source) != source:
                raise ValueError(f"trainer ranks disagree about {source.name!r}: {sources[source.name]} and {source}")
            boxes.setdefault(source.name, []).extend(shard.box for shard in shards)
    for name, held in boxes.items():
        numel, count = Box.whole(sources[name].shape).numel, sum(box.numel for box in held)
        if count != numel or not are_disjoint(held):
            raise ValueError(
                f"{name!r} has {numel} elements, the trainer ranks send {count}"
                f"{'' if are_disjoint(held) else ', some twice'}; "
                f"each must be sent once (see LocalShard for replicas)"
            )
    return list(sources.values())
