"""Buckets of the stock path: which tensor is at which byte range of which bucket. Pure arithmetic."""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tidemill_weight_update.copy.alignment import aligned
from tidemill_weight_update.memory.handle import TensorEntry
from tidemill_weight_update.send.modules import by_module, whole_modules
from tidemill_weight_update.tensors.shards import ShardLike, check_dense, sent_dtype
from tidemill_weight_update.tensors.source import NamedTensors, checked_item


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


def plan_buckets(named_tensors: NamedTensors, bucket_bytes: int, dtype: torch.dtype | None = None) -> Iterator[Bucket]:
    """Split `named_tensors` into buckets of at most `bucket_bytes`, in the order of their modules.

    The tensors of a module, which SGLang may combine, share a bucket; if they need more than `bucket_bytes`, the bucket
    is larger. A generator is read one module ahead, and only neighbouring tensors count as one module. Shapes of
    DTensors are global; nothing is gathered and no data is read here.

    Raises:
        TypeError: an item is not a `(name, tensor)` pair, the tensor has no dense storage, or it is a LocalShard.
        ValueError: a duplicate name, or no tensors at all.
    """
    seen: set[str] = set()
    checked = (_full(*checked_item(item, seen)) for item in named_tensors)
    items: list[tuple[str, Tensor]] = []
    used = index = 0
    grouped = by_module if isinstance(named_tensors, Iterator) else whole_modules
    for module in grouped(checked, lambda item: item[0]):
        room = _end(module, dtype, 0)
        if items and aligned(used) + room > bucket_bytes:
            yield _bucket(index, items, dtype, is_last=False)
            items, used = [], 0
            index += 1
        items += module
        used = _end(module, dtype, used)
    if not items:
        raise ValueError("expected named tensors, got an empty iterable; if it is a generator, create a new one")
    yield _bucket(index, items, dtype, is_last=True)


def _bucket(index: int, items: Sequence[tuple[str, Tensor]], dtype: torch.dtype | None, *, is_last: bool) -> Bucket:
    entries: list[TensorEntry] = []
    end = 0
    for name, tensor in items:
        start = aligned(end)
        to = sent_dtype(tensor, dtype)
        end = start + tensor.numel() * to.itemsize
        entries.append(TensorEntry(name=name, shape=tuple(tensor.shape), dtype=to, start=start, end=end))
    tensors = tuple(tensor for _, tensor in items)
    return Bucket(index=index, entries=tuple(entries), tensors=tensors, num_bytes=end, is_last=is_last)


def _end(items: Sequence[tuple[str, Tensor]], dtype: torch.dtype | None, used: int) -> int:
    for _, tensor in items:
        used = aligned(used) + tensor.numel() * sent_dtype(tensor, dtype).itemsize
    return used


def _full(name: str, tensor: Tensor | ShardLike) -> tuple[str, Tensor]:
    if not isinstance(tensor, Tensor):
        raise TypeError(
            f"{name!r} is a LocalShard, which only engines launched with **sglang_launch_args() can receive; launch "
            f"the engine with them, or pass a full tensor or a DTensor"
        )
    check_dense(name, tensor)
    return name, tensor
