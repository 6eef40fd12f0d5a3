"""Buckets of the stock path: which tensor is at which byte range of which bucket, and gathering them."""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from tidemill_weight_update.copy.table import aligned
from tidemill_weight_update.failure import Failure
from tidemill_weight_update.memory.handle import TensorEntry
from tidemill_weight_update.stats import Stages
from tidemill_weight_update.tensors.shards import (
    ShardLike,
    box_of_dtensor,
    check_dense,
    has_partial_sums,
    is_dtensor,
    sent_dtype,
)
from tidemill_weight_update.tensors.source import Item, checked_item

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class Bucket:
    """Tensors that are sent together. `tensors[i]`, still on the trainer's side, fills `entries[i]`."""

    index: int
    entries: tuple[TensorEntry, ...]
    tensors: tuple[Tensor, ...]
    num_bytes: int
    is_last: bool

    @property
    def payload_bytes(self) -> int:
        """Size of the tensors in bytes, without alignment gaps."""
        return sum(entry.num_bytes for entry in self.entries)

    def digest(self, *context: object) -> int:
        """Return a signed 64-bit hash that is equal on ranks with equal names, shapes, dtypes, order and `context`."""
        layout = [(entry.name, entry.shape, str(entry.dtype), entry.start) for entry in self.entries]
        text = repr((context, self.index, self.is_last, layout))
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little", signed=True)


def tensor_range(entries: tuple[TensorEntry, ...]) -> str:
    """Return the description of a bucket for messages: its first and last tensor and their number."""
    noun = "tensor" if len(entries) == 1 else "tensors"
    return f"{entries[0].name!r} .. {entries[-1].name!r}, {len(entries)} {noun}"


def plan_buckets(
    named_tensors: Iterable[Item], bucket_bytes: int, dtype: torch.dtype | None = None
) -> Iterator[Bucket]:
    """Split `named_tensors` into buckets of at most `bucket_bytes`, in the order of their modules.

    The tensors of a module, which SGLang may combine, share a bucket; if they need more than `bucket_bytes`, the bucket
    is larger. An iterator is read one module ahead, and only neighbouring tensors count as one module. Shapes of
    DTensors are global; nothing is gathered and no data is read here.

    Raises:
        TypeError: an item is not a `(name, tensor)` pair, the tensor has no dense storage, or it is a LocalShard.
        ValueError: a duplicate name, or no tensors at all.
    """
    seen: set[str] = set()
    checked = (_full(*checked_item(item, seen)) for item in named_tensors)
    grouped = by_module if isinstance(named_tensors, Iterator) else whole_modules
    index = used = 0
    items: list[tuple[str, Tensor]] = []
    for module in grouped(checked, lambda item: item[0]):
        num_bytes = sum(aligned(_num_bytes(tensor, dtype)) for _, tensor in module)
        if items and used + num_bytes > bucket_bytes:
            yield _bucket(index, items, dtype, is_last=False)
            index, items, used = index + 1, [], 0
        items += module
        used += num_bytes
    if items:
        yield _bucket(index, items, dtype, is_last=True)
    if not seen:
        raise ValueError("expected named tensors, got an empty iterable")


def by_module(items: Iterable[T], name: Callable[[T], str]) -> Iterator[list[T]]:
    """Group neighbouring items whose names are equal except for the last two parts, reading one item ahead.

    These are the tensors of one module, such as `layers.0.self_attn.q_proj.weight` and
    `layers.0.self_attn.k_proj.bias`. Tensors that a loader combines belong to one module: projections that an engine
    fuses, a weight and its scale.
    """
    group: list[T] = []
    for item in items:
        if group and _module(name(item)) != _module(name(group[0])):
            yield group
            group = []
        group.append(item)
    if group:
        yield group


def whole_modules(items: Iterable[T], name: Callable[[T], str]) -> list[list[T]]:
    """Group items as `by_module` does, independent of their position, in the order in which modules first appear."""
    groups: dict[str, list[T]] = {}
    for item in items:
        groups.setdefault(_module(name(item)), []).append(item)
    return list(groups.values())


def _module(name: str) -> str:
    return name.rsplit(".", 2)[0]


def _bucket(index: int, items: Sequence[tuple[str, Tensor]], dtype: torch.dtype | None, *, is_last: bool) -> Bucket:
    entries: list[TensorEntry] = []
    end = 0
    for name, tensor in items:
        start = aligned(end)
        end = start + _num_bytes(tensor, dtype)
        to = sent_dtype(tensor, dtype)
        entries.append(TensorEntry(name=name, shape=tuple(tensor.shape), dtype=to, start=start, end=end))
    tensors = tuple(tensor for _, tensor in items)
    return Bucket(index=index, entries=tuple(entries), tensors=tensors, num_bytes=end, is_last=is_last)


def _num_bytes(tensor: Tensor, dtype: torch.dtype | None) -> int:
    return tensor.numel() * sent_dtype(tensor, dtype).itemsize


def _full(name: str, tensor: Tensor | ShardLike) -> tuple[str, Tensor]:
    if not isinstance(tensor, Tensor):
        raise TypeError(
            f"{name!r} is a LocalShard, which only engines launched with **sglang_launch_args() can receive; launch "
            f"the engine with them, or pass a full tensor or a DTensor"
        )
    check_dense(name, tensor)
    return name, tensor


def check_parts(bucket: Bucket) -> None:
    """Check this rank's parts before `gather`, in which other ranks wait for it.

    Raises:
        TypeError: a DTensor has an unsupported placement.
        ValueError: the local values of a DTensor do not fit its placements.
    """
    for entry, tensor in zip(bucket.entries, bucket.tensors, strict=True):
        if is_dtensor(tensor) and not has_partial_sums(tensor):
            box_of_dtensor(entry.name, tensor)


def gather(bucket: Bucket, arena: Tensor | None, failure: Failure, stages: Stages) -> None:
    """Copy the full tensors of `bucket`, cast to the dtypes of its entries, to their places in `arena`.

    Collective over the ranks that hold the tensors. Every rank holds one full tensor at a time.

    Args:
        arena: memory of the bucket, uint8; None on ranks other than 0.
        failure: receives an error of a copy. The remaining tensors are still gathered, because other ranks wait.
    """
    for entry, tensor in zip(bucket.entries, bucket.tensors, strict=True):
        with stages("gather"):
            full = _gathered(tensor)
        if arena is not None and failure.error is None:
            with failure, stages("fill"):
                entry.view(arena).copy_(full)


def _gathered(tensor: Tensor) -> Tensor:
    if not is_dtensor(tensor):
        return tensor
    # Parameters that FSDP2 offloaded to the CPU have a mesh of GPUs, whose collectives accept GPU memory only.
    tensor = tensor.to(tensor.device_mesh.device_type)
    assert is_dtensor(tensor)
    return tensor.full_tensor()
