"""Wires, each of which connects one trainer rank with one engine rank, and the part of a bucket that is sent over one.

Here is the wire for host memory, over TCP.
"""

import contextlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import timedelta
from itertools import islice
from typing import Protocol

import torch
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, ProcessGroupGloo, Store, Work

from tidemill_weight_update.control.descriptor import BucketDescriptor
from tidemill_weight_update.copy.copier import Copier
from tidemill_weight_update.copy.table import Copy, CopyTable, build_tables, in_a_row
from tidemill_weight_update.plan.plan import CopyPlan
from tidemill_weight_update.tensors import Box, are_disjoint

TRAINER, ENGINE = 0, 1
"""Ranks of the two sides of a wire."""


class WireError(RuntimeError):
    """A wire that broke, or on which nothing moved in time. It cannot be used again."""


class Wire(Protocol):
    """A connection that carries one transfer at a time: `send` or `recv` starts it, `wait` completes it.

    `data` is a contiguous uint8 tensor. If it is on a GPU, the caller has synchronized the device.
    """

    def send(self, data: Tensor) -> None: ...

    def recv(self, data: Tensor) -> None: ...

    def wait(self, timeout_s: float, check: Callable[[], None]) -> None:
        """Return when the transfer is complete: the memory may be reused, or is filled.

        Args:
            check: raises if the wait has become pointless. Not every wire calls it.

        Raises:
            WireError: the wire broke, or the transfer took longer than `timeout_s`.
        """
        ...

    def close(self) -> None:
        """Close this side, independent of the other side."""
        ...


class GlooWire:
    """Host memory over TCP, by torch's gloo backend.

    A running transfer cannot be polled, only waited for: gloo closes the connection when a wait times out. If the other
    process exits or closes its side, the wait ends at once.
    """

    def __init__(self, store: Store, name: str, rank: int, address: str, timeout_s: float) -> None:
        options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._timeout = timedelta(seconds=timeout_s)
        options._threads = 1
        with _as_wire_error("could not be connected"):
            options._devices = [ProcessGroupGloo.create_device(hostname=address)]
            self._group = ProcessGroupGloo(PrefixStore(name, store), rank, 2, options)
        self._peer = 1 - rank
        self._work: Work | None = None

    def send(self, data: Tensor) -> None:
        with _as_wire_error("broke"):
            self._work = self._group.send([data], self._peer, 0)  # type: ignore[attr-defined]

    def recv(self, data: Tensor) -> None:
        with _as_wire_error("broke"):
            self._work = self._group.recv([data], self._peer, 0)  # type: ignore[attr-defined]

    def wait(self, timeout_s: float, check: Callable[[], None]) -> None:
        work, self._work = self._work, None
        assert work is not None, "call send or recv before wait"
        with _as_wire_error("broke"):
            work.wait(timedelta(seconds=timeout_s))

    def close(self) -> None:
        self._work = None
        self._group.abort()
        # Its threads, sockets and files live as long as the group, but the traceback of an error may keep this object.
        del self._group


@contextlib.contextmanager
def _as_wire_error(what: str) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        reason = str(error).splitlines()[0].split("] ", 1)[-1]  # without gloo's source location
        raise WireError(f"{what} ({reason})") from error


Parts = tuple[tuple[Box, ...], ...]
"""For each source of a bucket, disjoint boxes, each inside one of the bucket's shards."""


def parts_of(descriptor: BucketDescriptor, plan: CopyPlan) -> Parts:
    """Return what the plan reads of the bucket; all of a tensor that is loaded by the model's own loader."""
    read: dict[str, list[Box]] = {source.name: [] for source in descriptor.sources}
    for copy in plan.copies:
        if copy.name in read:
            read[copy.name].append(copy.box)
    parts = []
    for source, shards in zip(descriptor.sources, descriptor.shards, strict=True):
        boxes = [Box.whole(source.shape)] if source.name in plan.through_loader else _disjoint(read[source.name])
        common = (box.intersect(shard.box) for shard in shards for box in boxes)
        parts.append(tuple(box for box in common if box is not None))
    return tuple(parts)


def _disjoint(boxes: Sequence[Box]) -> list[Box]:
    """Return the distinct boxes; if two overlap, the smallest box around all of them."""
    distinct = list(dict.fromkeys(boxes))
    if are_disjoint(distinct):
        return distinct
    dims = range(len(distinct[0].shape))
    start = tuple(min(box.start[dim] for box in distinct) for dim in dims)
    end = [max(box.start[dim] + box.shape[dim] for box in distinct) for dim in dims]
    return [Box(start, tuple(stop - first for stop, first in zip(end, start, strict=True)))]


def parts_to_json(parts: Parts) -> bytes:
    return json.dumps([[[box.start, box.shape] for box in boxes] for boxes in parts], separators=(",", ":")).encode()


def parts_from_json(text: bytes) -> Parts:
    return tuple(tuple(Box(tuple(start), tuple(shape)) for start, shape in boxes) for boxes in json.loads(text))


def pack_descriptor(descriptor: BucketDescriptor, parts: Parts) -> tuple[BucketDescriptor, int]:
    """Place the parts one after the other, as both sides do; return the descriptor and the size of the message."""
    sources = zip(descriptor.sources, parts, strict=True)
    places, num_bytes = in_a_row((box, source.dtype.itemsize) for source, boxes in sources for box in boxes)
    left = iter(places)
    shards = tuple(tuple(islice(left, len(boxes))) for boxes in parts)
    return replace(descriptor, shards=shards, memories=()), num_bytes


def _pack_tables(descriptor: BucketDescriptor, packed: BucketDescriptor) -> tuple[CopyTable, ...]:
    """Return the copies from the bucket's arena (memory 0) into the message (target 0)."""
    copies = [
        Copy(source.name, place.box, "message", place.offset, place.strides, source.dtype)
        for source, places in zip(packed.sources, packed.shards, strict=True)
        for place in places
    ]
    shards = {source.name: held for source, held in zip(descriptor.sources, descriptor.shards, strict=True)}
    return build_tables(copies, descriptor.sources, shards, ("message",))


class Message:
    """The part of a bucket, in an arena on `device`, that is sent to engine ranks which read the same parts."""

    def __init__(self, descriptor: BucketDescriptor, parts: bytes, device: torch.device) -> None:
        packed, self.num_bytes = pack_descriptor(descriptor, parts_from_json(parts))
        is_whole_bucket = packed.shards == descriptor.shards
        self._copier = None if is_whole_bucket else Copier(_pack_tables(descriptor, packed), device)

    def pack(self, arena: Tensor) -> Tensor:
        """Return the parts of the bucket in `arena`, uint8 [num_bytes]; on a GPU the copy is queued."""
        if self._copier is None:
            return arena[: self.num_bytes]
        packed = torch.empty(self.num_bytes, dtype=torch.uint8, device=arena.device)
        self._copier.run([arena], [packed])
        return packed
