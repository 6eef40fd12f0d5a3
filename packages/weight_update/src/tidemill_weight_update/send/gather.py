"""Gathering of a bucket's tensors on the rank that owns the arena, with one collective for all shards of a mesh."""

import math
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from tidemill_weight_update.copy.alignment import aligned
from tidemill_weight_update.memory.handle import TensorEntry
from tidemill_weight_update.send.bucket import Bucket
from tidemill_weight_update.tensors.shards import is_dtensor, shard_range

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor


@dataclass(frozen=True, kw_only=True, slots=True)
class GatheredPiece:
    """Values of a part of a tensor: indices `[start, start + values.shape[dim])` of `dim`."""

    entry: TensorEntry
    values: Tensor
    dim: int = 0
    start: int = 0

    def copy_to(self, arena: Tensor) -> None:
        """Copy, and cast to the entry's dtype, into its place in `arena` (uint8)."""
        target = self.entry.view(arena)
        if self.values.shape != target.shape:
            target = target.narrow(self.dim, self.start, self.values.shape[self.dim])
        target.copy_(self.values)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Sharded:
    entry: TensorEntry
    local: Tensor
    dim: int

    def shard_shape(self, rank: int, num_ranks: int) -> tuple[int, ...]:
        shape = list(self.entry.shape)
        shape[self.dim] = shard_range(shape[self.dim], rank, num_ranks)[1]
        return tuple(shape)


def check_parts(bucket: Bucket) -> None:
    """Check this rank's parts before `gather`, in which other ranks wait for it.

    Raises:
        ValueError: the local values of a DTensor do not fit its placements.
    """
    for entry, tensor in zip(bucket.entries, bucket.tensors, strict=True):
        axes = _sharded_axes(tensor) if is_dtensor(tensor) else None
        if not is_dtensor(tensor) or axes is None or len(axes) != 1 or tensor.device_mesh.get_coordinate() is None:
            continue
        ((axis, dim),) = axes.items()
        sharded = _Sharded(entry=entry, local=tensor.to_local(), dim=dim)
        expected = sharded.shard_shape(tensor.device_mesh.get_local_rank(axis), tensor.device_mesh.size(axis))
        if tuple(sharded.local.shape) != expected and (sharded.local.numel() or math.prod(expected)):
            raise ValueError(
                f"tensor {entry.name!r} has local shape {tuple(sharded.local.shape)} on this rank, but its placements "
                f"{tensor.placements} of {entry.shape} require {expected} (split as torch.chunk does)"
            )


def gather(bucket: Bucket, owner: int) -> list[GatheredPiece]:
    """Gather the tensors of `bucket` on global rank `owner`; the result of other ranks is not used.

    Collective over the ranks that hold the tensors. DTensors sharded along one mesh axis are cast and sent together,
    with one gather per mesh; other ranks never hold a full tensor. Other layouts (several shardings, Partial) use
    `full_tensor`, one by one.
    """
    # A DTensor cannot exist before its module is imported, and importing it takes two seconds.
    if "torch.distributed.tensor" not in sys.modules:
        return [
            GatheredPiece(entry=entry, values=tensor)
            for entry, tensor in zip(bucket.entries, bucket.tensors, strict=True)
        ]
    from torch.distributed.tensor import DTensor

    pieces: list[GatheredPiece] = []
    batches: dict[tuple[DeviceMesh, int], list[_Sharded]] = {}
    for entry, tensor in zip(bucket.entries, bucket.tensors, strict=True):
        if not isinstance(tensor, DTensor):
            pieces.append(GatheredPiece(entry=entry, values=tensor))
            continue
        axes = _sharded_axes(tensor)
        if axes is None or len(axes) > 1:
            pieces.append(GatheredPiece(entry=entry, values=tensor.full_tensor()))
        elif not axes:
            pieces.append(GatheredPiece(entry=entry, values=tensor.to_local()))
        else:
            ((axis, dim),) = axes.items()
            sharded = _Sharded(entry=entry, local=tensor.to_local(), dim=dim)
            batches.setdefault((tensor.device_mesh, axis), []).append(sharded)
    for (mesh, axis), batch in batches.items():
        pieces += _gather_batch(batch, mesh, axis, owner)
    return pieces


def _sharded_axes(tensor: "DTensor") -> dict[int, int] | None:
    """Return mesh axis -> tensor dim of the plain shardings; None if a placement is neither Shard nor Replicate."""
    from torch.distributed.tensor import Replicate, Shard

    axes: dict[int, int] = {}
    for axis, placement in enumerate(tensor.placements):
        if type(placement) is Shard:  # strided shards, a subclass, are split differently
            axes[axis] = placement.dim % tensor.ndim
        elif type(placement) is not Replicate:
            return None
    return axes


def _gather_batch(batch: list[_Sharded], mesh: "DeviceMesh", axis: int, owner: int) -> list[GatheredPiece]:
    group = mesh.get_group(axis)
    members = dist.get_process_group_ranks(group)
    if owner not in members:  # a replica of what the owner gathers along its own row of the mesh
        return []
    num_ranks, rank = len(members), dist.get_rank(group)
    layouts = [
        _packed([item.entry for item in batch], [item.shard_shape(r, num_ranks) for item in batch])
        for r in range(num_ranks)
    ]
    size = max(layout[-1].end for layout in layouts)
    buffer = torch.empty(max(size, 1), dtype=torch.uint8, device=mesh.device_type)
    for item, place in zip(batch, layouts[rank], strict=True):
        place.view(buffer).copy_(item.local)
    if dist.get_rank() != owner:
        dist.gather(buffer, None, dst=owner, group=group)
        return []
    received = [torch.empty_like(buffer) for _ in members]
    dist.gather(buffer, received, dst=owner, group=group)
    return [
        GatheredPiece(
            entry=item.entry,
            values=place.view(received[r]),
            dim=item.dim,
            start=shard_range(item.entry.shape[item.dim], r, num_ranks)[0],
        )
        for r in range(num_ranks)
        for item, place in zip(batch, layouts[r], strict=True)
        if place.num_bytes
    ]


def _packed(entries: list[TensorEntry], shapes: list[tuple[int, ...]]) -> list[TensorEntry]:
    """Return places for tensors of the entries' dtypes and of `shapes`, one after the other."""
    places: list[TensorEntry] = []
    end = 0
    for entry, shape in zip(entries, shapes, strict=True):
        start = aligned(end)
        end = start + torch.Size(shape).numel() * entry.dtype.itemsize
        places.append(TensorEntry(name=entry.name, shape=shape, dtype=entry.dtype, start=start, end=end))
    return places
