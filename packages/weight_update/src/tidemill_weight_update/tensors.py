"""Tensors that a trainer rank passes, the part that it holds of each, and the boxes of indices that parts cover."""

import math
import operator
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, Self, runtime_checkable

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor
    from typing_extensions import TypeIs


@dataclass(frozen=True, slots=True)
class Box:
    """The indices `start[d] <= i_d < start[d] + shape[d]`. A box without dims is the single element of a scalar."""

    start: tuple[int, ...]
    shape: tuple[int, ...]

    @classmethod
    def whole(cls, shape: tuple[int, ...]) -> Self:
        """Return the box of all indices of a tensor of this shape."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def intersect(self, other: "Box") -> "Box | None":
        """Return the indices in both boxes, or None if there are none."""
        start, shape = [], []
        for a, n, b, m in zip(self.start, self.shape, other.start, other.shape, strict=True):
            low = max(a, b)
            size = min(a + n, b + m) - low
            if size <= 0:
                return None
            start.append(low)
            shape.append(size)
        return Box(tuple(start), tuple(shape))


def are_disjoint(boxes: Sequence[Box]) -> bool:
    """Return whether no index is in two boxes. Fast for many boxes that divide a space along one dim."""
    num_dims = min((len(box.shape) for box in boxes), default=0)
    # Sort along the dim with the most distinct starts; compare each box only with those that start before its end.
    dim = max(range(num_dims), key=lambda d: len({box.start[d] for box in boxes}), default=None)
    ordered = list(boxes) if dim is None else sorted(boxes, key=lambda box: box.start[dim])
    for number, box in enumerate(ordered):
        for other in range(number + 1, len(ordered)):
            if dim is not None and ordered[other].start[dim] >= box.start[dim] + box.shape[dim]:
                break
            if box.intersect(ordered[other]) is not None:
                return False
    return True


def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides, in elements, of a contiguous tensor of this shape."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))


@dataclass(frozen=True, slots=True)
class SourceSpec:
    """A tensor that the trainer sends: its name, its full (global) shape and the dtype in which it is sent."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype


_PLAIN = {Tensor, nn.Parameter}


@runtime_checkable
class ShardLike(Protocol):
    """An object with the attributes of `LocalShard`, which may be a class of the trainer."""

    @property
    def tensor(self) -> Tensor: ...
    @property
    def global_shape(self) -> tuple[int, ...]: ...
    @property
    def start(self) -> tuple[int, ...]: ...
    @property
    def replica(self) -> int: ...
    @property
    def num_replicas(self) -> int: ...


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LocalShard:
    """A part of a tensor, from a trainer with its own parallelism. Pass it in place of the tensor.

    Only ranks that hold a part of a tensor pass its name; experts and pipeline stages of other ranks are left out. A
    rank that holds several parts of a tensor passes its name with each part.

    Attributes:
        tensor: local values, with any strides.
        global_shape: shape of the whole tensor.
        start: index of the first element of `tensor` in the whole tensor, one number per dim; zeros if `tensor` is the
            whole tensor.
        replica: index of this copy among `num_replicas` equal copies, usually the data-parallel rank. One of the copies
            is sent.
        num_replicas: number of equal copies.
    """

    tensor: Tensor
    global_shape: tuple[int, ...]
    start: tuple[int, ...]
    replica: int = 0
    num_replicas: int = 1


def box_of_shard(name: str, shard: ShardLike) -> Box:
    """Return the indices that a part of tensor `name` covers in the whole tensor."""
    if not isinstance(shard.tensor, Tensor):
        raise TypeError(f"the LocalShard of tensor {name!r} must have a torch.Tensor, got a {type(shard.tensor)}")
    try:
        start = tuple(map(operator.index, shard.start))
        whole = global_shape_of(shard)
    except TypeError as error:
        raise TypeError(
            f"the LocalShard of tensor {name!r} must have one int per dim in start and global_shape, got "
            f"{shard.start!r} and {shard.global_shape!r}"
        ) from error
    shape = tuple(shard.tensor.shape)
    problem = f"the LocalShard of tensor {name!r} does not fit its global shape:"
    if not 0 <= shard.replica < shard.num_replicas:
        raise ValueError(f"{problem} replica must be in [0, num_replicas), got {shard.replica} of {shard.num_replicas}")
    if not len(start) == len(shape) == len(whole) or any(
        at < 0 or at + size > limit for at, size, limit in zip(start, shape, whole, strict=True)
    ):
        raise ValueError(f"{problem} a tensor of shape {shape} that starts at {start} is not inside {whole}")
    return Box(start=start, shape=shape)


def global_shape_of(tensor: Tensor | ShardLike) -> tuple[int, ...]:
    """Return the shape of the whole tensor; numbers of numpy as ints."""
    return tuple(tensor.shape) if isinstance(tensor, Tensor) else tuple(map(operator.index, tensor.global_shape))


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Piece:
    """A part of a tensor that this rank sends.

    Attributes:
        spec: the whole tensor, in the dtype in which it is sent.
        box: indices of the part.
        local: its values; on the meta device if they are passed later.
        device: device of the values.
    """

    spec: SourceSpec
    box: Box
    local: Tensor
    device: torch.device

    def without_data(self) -> "Piece":
        """Return a description of this piece that keeps no memory alive."""
        local = self.local
        meta = torch.empty_strided(local.shape, local.stride(), dtype=local.dtype, device="meta")
        return Piece(spec=self.spec, box=self.box, local=meta, device=self.device)

    def form(self) -> tuple[object, ...]:
        """Return everything except the values."""
        return self.spec, self.box, self.local.dtype, self.local.stride(), self.device


def piece_to_send(name: str, tensor: Tensor | ShardLike, dtype: torch.dtype | None, group_rank: int) -> Piece | None:
    """Return what this rank sends of `tensor`, or None if it holds no part or another rank sends its copy.

    Group rank 0 sends plain tensors. One of several equal copies is sent, selected by a hash of the name, so that all
    holders share the work.

    Args:
        dtype: see `sent_dtype`.
    """
    place = place_of(name, tensor)
    if place is None:
        return None
    box, (index, count) = place
    if not isinstance(tensor, Tensor):
        local = tensor.tensor
    elif is_dtensor(tensor):
        local = tensor.to_local()
    else:
        local, index = tensor, group_rank
    check_dense(name, local)
    if index != zlib.crc32(name.encode()) % count or box.numel == 0:
        return None
    local = dense_values(name, local)
    spec = SourceSpec(name=name, shape=global_shape_of(tensor), dtype=sent_dtype(local, dtype))
    return Piece(spec=spec, box=box, local=local.detach(), device=local.device)


def place_of(name: str, tensor: Tensor | ShardLike) -> tuple[Box, tuple[int, int]] | None:
    """Return the indices that this rank's part of a tensor covers, and index and number of its equal copies; None if
    this rank holds no part.
    """
    if not isinstance(tensor, Tensor):
        return box_of_shard(name, tensor), (tensor.replica, tensor.num_replicas)
    return box_of_dtensor(name, tensor) if is_dtensor(tensor) else (Box.whole(tuple(tensor.shape)), (0, 1))


def sent_dtype(tensor: Tensor, dtype: torch.dtype | None) -> torch.dtype:
    """Return the dtype in which `tensor` is sent: `dtype` for floating-point tensors if it is given, else its own.

    Floating-point dtypes of one byte are never cast, because their values are meaningless without their scale.
    """
    if dtype is None or not tensor.is_floating_point() or tensor.dtype.itemsize == 1:
        return tensor.dtype
    return dtype


def check_dense(name: str, tensor: Tensor) -> None:
    """Raise TypeError unless the tensor has dense storage that can be sent."""
    is_lazy = tensor.is_conj() or tensor.is_neg()
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.device.type == "meta" or is_lazy:
        raise TypeError(
            f"tensor {name!r} must be dense and have data, got layout {tensor.layout}, dtype {tensor.dtype}, "
            f"device {tensor.device}{', lazily conjugated or negated (call resolve_conj().resolve_neg())' * is_lazy}"
        )


def dense_values(name: str, tensor: Tensor) -> Tensor:
    """Return the values of `tensor` in memory that can be read by address."""
    values = unwrapped(tensor)
    if is_traceable_wrapper_subclass(values) or values.data_ptr() == 0:
        raise TypeError(
            f"tensor {name!r} is a {type(values).__module__}.{type(values).__qualname__} without memory of its own; "
            f"expected exactly one inner tensor of shape {tuple(values.shape)} and dtype {values.dtype}; pass its "
            f"values as a plain tensor"
        )
    return values


def unwrapped(tensor: Tensor) -> Tensor:
    """Return the tensor inside a wrapper that only adds methods (such as torchao's weights for FSDP2's float8
    all-gather), else the tensor itself.
    """
    while is_traceable_wrapper_subclass(tensor):
        from torch.distributed._functional_collectives import AsyncCollectiveTensor

        if isinstance(tensor, AsyncCollectiveTensor):
            tensor = tensor.trigger_wait()
            continue
        names, _ = tensor.__tensor_flatten__()
        inner = [getattr(tensor, name) for name in names]
        same = [each for each in inner if each.shape == tensor.shape and each.dtype == tensor.dtype]
        if len(same) != 1:
            break
        tensor = same[0]
    return tensor


def local_values(tensor: Tensor | ShardLike) -> Tensor:
    """Return this process's part of a tensor."""
    if type(tensor) in _PLAIN:  # fast path: called for thousands of tensors at each update
        return tensor  # type: ignore[return-value]
    if not isinstance(tensor, Tensor):
        return unwrapped(tensor.tensor)
    return unwrapped(tensor.to_local() if is_dtensor(tensor) else tensor)


def is_dtensor(tensor: Tensor) -> "TypeIs[DTensor]":
    # A DTensor cannot exist before its module is imported, and importing it takes two seconds.
    """Return whether `tensor` is a DTensor, without importing the DTensor module."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def box_of_dtensor(name: str, tensor: "DTensor") -> tuple[Box, tuple[int, int]] | None:
    """See `place_of`."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    mesh = tensor.device_mesh
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return None
    replica, num_replicas = 0, 1
    splits: list[tuple[int, int]] = []  # axis and dim, in the order in which the tensor is split
    for axis, placement in reversed(list(enumerate(tensor.placements))):
        if isinstance(placement, Replicate):
            replica, num_replicas = replica + num_replicas * coordinate[axis], num_replicas * mesh.size(axis)
        elif isinstance(placement, _StridedShard):  # FSDP over tensor parallelism: split after the axes to its right
            dim = placement.dim % tensor.ndim
            if placement.split_factor != math.prod(mesh.size(a) for a, d in splits if d == dim):
                raise TypeError(
                    f"tensor {name!r} has unsupported placements {tensor.placements}; pass its parts as LocalShard"
                )
            splits.append((axis, dim))
        elif isinstance(placement, Shard):
            splits.insert(0, (axis, placement.dim % tensor.ndim))
        else:
            raise TypeError(
                f"tensor {name!r} has an unsupported placement {placement!r}; pass its parts as LocalShard, or reduce "
                f"partial sums with redistribute()"
            )
    start, shape = [0] * tensor.ndim, list(tensor.shape)
    for axis, dim in splits:
        offset, shape[dim] = shard_range(shape[dim], coordinate[axis], mesh.size(axis))
        start[dim] += offset
    box = Box(start=tuple(start), shape=tuple(shape))
    local = tensor.to_local()
    if tuple(local.shape) != box.shape and (local.numel() or box.numel):
        raise ValueError(
            f"tensor {name!r} has local shape {tuple(local.shape)} on rank {mesh.get_rank()}, but its placements "
            f"{tensor.placements} of {tuple(tensor.shape)} require {box.shape} (split as torch.chunk does); pass "
            f"parts of other sizes as LocalShard(start=...)"
        )
    return box, (replica, num_replicas)


def shard_range(size: int, rank: int, num_ranks: int) -> tuple[int, int]:
    """Return start and length of shard `rank` of a dimension of `size`, split as `torch.chunk` and DTensor's Shard
    split it.
    """
    chunk = -(-size // num_ranks)
    start = min(rank * chunk, size)
    return start, min(chunk, size - start)


Item = tuple[str, Tensor | ShardLike]

NamedTensors = Iterable[Item] | Callable[[], Iterable[Item]]
"""Tensors that stay where they are; or a function that makes them one after the other, so that none is needed longer
than its bucket.
"""

Source = list[Item] | Callable[[], Iterable[Item]]
"""The same, after an iterator is read."""


def source_of(named_tensors: NamedTensors) -> Source:
    """Return the tensors as a list, or the function that makes them."""
    if isinstance(named_tensors, torch.nn.Module):
        raise TypeError(f"expected (name, tensor) pairs, got {named_tensors!r:.80}; pass .named_parameters()")
    if not callable(named_tensors) and not isinstance(named_tensors, Iterable):
        raise TypeError(f"expected (name, tensor) pairs or a function that returns them, got {named_tensors!r:.80}")
    return named_tensors if callable(named_tensors) else list(named_tensors)


def items_of(source: Source) -> Iterable[Item]:
    """Return the tensors; those of a function are made while they are read."""
    items = source() if callable(source) else source
    if not isinstance(items, Iterable):
        raise TypeError(f"expected a function that returns (name, tensor) pairs, {source!r} returned {items!r:.80}")
    return items


def checked_items(items: Iterable[object]) -> Iterator[Item]:
    """Yield the items after checking their types, and that no tensor is passed twice."""
    seen: set[str] = set()
    for item in items:
        if not isinstance(item, tuple) or len(item) != 2:
            raise TypeError(f"expected (name, tensor) pairs, got {item!r:.80}; for a dict pass .items()")
        name, tensor = item
        if not isinstance(name, str) or not isinstance(tensor, Tensor | ShardLike):
            raise TypeError(f"expected (str, Tensor or LocalShard), got ({name!r:.80}, {type(tensor).__name__})")
        if name in seen and isinstance(tensor, Tensor):  # engines check that shards do not overlap
            raise ValueError(f"tensor {name!r} was passed twice in one update; pass each name once")
        seen.add(name)
        yield name, tensor
