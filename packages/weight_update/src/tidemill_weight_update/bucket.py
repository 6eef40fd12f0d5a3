"""Buckets: which tensor goes to which byte range of which bucket. Pure, no device and no process is touched."""

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

ALIGNMENT = 64
"""Every tensor starts at a multiple of this many bytes: views of any dtype are legal and copies are vectorised."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorEntry:
    """One tensor of a bucket: its name, what the engine sees, and its byte range `[start, end)` in the arena."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    start: int
    end: int

    @property
    def num_bytes(self) -> int:
        return self.end - self.start

    def view(self, arena: Tensor) -> Tensor:
        """The tensor inside `arena` (uint8 [num_bytes]), sharing its memory."""
        return arena[self.start : self.end].view(self.dtype).view(self.shape)


@dataclass(frozen=True, kw_only=True, slots=True)
class Bucket:
    """Tensors that travel together. `tensors[i]`, still on the trainer's side, will fill `entries[i]`."""

    index: int
    entries: tuple[TensorEntry, ...]
    tensors: tuple[Tensor, ...]
    num_bytes: int
    is_last: bool

    @property
    def payload_bytes(self) -> int:
        """Bytes of the tensors, without the gaps that alignment leaves."""
        return sum(entry.num_bytes for entry in self.entries)

    def digest(self, *context: object) -> int:
        """A signed 64-bit number that ranks compare: equal when names, shapes, dtypes, order and `context` are."""
        layout = [(entry.name, entry.shape, str(entry.dtype), entry.start) for entry in self.entries]
        text = repr((context, self.index, self.is_last, layout))
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little", signed=True)


def aligned(offset: int) -> int:
    """The first multiple of ALIGNMENT that is not below `offset`."""
    return -(-offset // ALIGNMENT) * ALIGNMENT


def tensor_range(entries: tuple[TensorEntry, ...]) -> str:
    """How a bucket is named in messages: its first and last tensor and their number."""
    noun = "tensor" if len(entries) == 1 else "tensors"
    return f"{entries[0].name!r} .. {entries[-1].name!r}, {len(entries)} {noun}"


def sent_dtype(tensor: Tensor, dtype: torch.dtype | None) -> torch.dtype:
    """The dtype in which `tensor` is sent: `dtype` for floating-point tensors if it is given, else its own."""
    return tensor.dtype if dtype is None or not tensor.is_floating_point() else dtype


def plan_buckets(
    named_tensors: Iterable[tuple[str, Tensor]], bucket_bytes: int, dtype: torch.dtype | None = None
) -> Iterator[Bucket]:
    """Cuts `named_tensors` into buckets of at most `bucket_bytes`, in order, reading one item ahead.

    A tensor larger than `bucket_bytes` gets a bucket of its own, of its own size. Shapes of DTensors are global;
    nothing is gathered and no data is read here.

    Raises:
        TypeError: an item is not a `(name, tensor)` pair, or the tensor has no dense storage.
        ValueError: a name comes twice, or there are no tensors at all.
    """
    entries: list[TensorEntry] = []
    tensors: list[Tensor] = []
    seen: set[str] = set()
    used = index = 0
    for item in named_tensors:
        name, tensor = _checked(item, seen)
        seen.add(name)
        to = sent_dtype(tensor, dtype)
        num_bytes = tensor.numel() * to.itemsize
        start = aligned(used)
        if entries and start + num_bytes > bucket_bytes:
            yield Bucket(index=index, entries=tuple(entries), tensors=tuple(tensors), num_bytes=used, is_last=False)
            entries, tensors = [], []
            index, start = index + 1, 0
        used = start + num_bytes
        entries.append(TensorEntry(name=name, shape=tuple(tensor.shape), dtype=to, start=start, end=used))
        tensors.append(tensor)
    if not entries:
        raise ValueError("expected named tensors, got an empty iterable: was the generator used before?")
    yield Bucket(index=index, entries=tuple(entries), tensors=tuple(tensors), num_bytes=used, is_last=True)


def _checked(item: object, seen: set[str]) -> tuple[str, Tensor]:
    if not isinstance(item, tuple) or len(item) != 2:
        raise TypeError(f"expected (name, tensor) pairs, got {item!r:.80}; of a dict pass .items()")
    name, tensor = item
    if not isinstance(name, str) or not isinstance(tensor, Tensor):
        raise TypeError(f"expected (str, Tensor), got ({name!r:.80}, {type(tensor).__name__})")
    if name in seen:
        raise ValueError(f"tensor {name!r} came twice in one update; each name may be sent once")
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.device.type == "meta":
        raise TypeError(
            f"tensor {name!r} must be dense and hold data, got layout {tensor.layout}, dtype {tensor.dtype}, "
            f"device {tensor.device}"
        )
    return name, tensor
