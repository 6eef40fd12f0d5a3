"""Named meshes: which shard of a batch each rank of a group receives, and which ranks are collected."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True, kw_only=True, slots=True)
class MeshEntry:
    """Place of one rank in a mesh.

    Attributes:
        dp_rank: index of the shard that the rank receives.
        is_collect: whether the result of the rank is collected.
        dp_size: number of shards, or None if the rank did not register it.
    """

    dp_rank: int
    is_collect: bool
    dp_size: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class MeshLayout:
    """Places of all ranks in one mesh, validated.

    Attributes:
        dp_ranks: dp_rank by rank; length is the group's world_size.
        collect_ranks: rank whose result is collected, by dp_rank; length is dp_size.
    """

    dp_ranks: tuple[int, ...]
    collect_ranks: tuple[int, ...]

    @property
    def dp_size(self) -> int:
        return len(self.collect_ranks)

    @classmethod
    def of_all_ranks(cls, world_size: int) -> "MeshLayout":
        """Return the mesh in which each rank is a dp rank."""
        ranks = tuple(range(world_size))
        return cls(dp_ranks=ranks, collect_ranks=ranks)

    @classmethod
    def from_entries(cls, name: str, entries: Sequence[MeshEntry | None]) -> "MeshLayout":
        """Validate the entries of all ranks; `entries[rank]` is None for a rank that did not register this mesh.

        Raises:
            ValueError: a rank registered nothing, the ranks disagree on dp_size, a dp_rank is missing or not below
                dp_size, or a dp_rank does not have exactly one collect rank. The message names the mesh and the ranks.
        """
        absent = [rank for rank, entry in enumerate(entries) if entry is None]
        present = [entry for entry in entries if entry is not None]
        if absent:
            raise ValueError(
                f"mesh {name!r}: ranks {absent} of {len(entries)} did not register it; "
                "call register_mesh or register_dispatch_collect_info on every rank"
            )
        dp_sizes = {rank: entry.dp_size for rank, entry in enumerate(present) if entry.dp_size is not None}
        if len(set(dp_sizes.values())) > 1:
            raise ValueError(f"mesh {name!r}: all ranks must register the same dp_size, got by rank {dp_sizes}")
        dp_size = next(iter(dp_sizes.values()), 1 + max(entry.dp_rank for entry in present))
        problems = [
            f"rank {rank} has dp_rank {entry.dp_rank}, expected less than dp_size {dp_size}"
            for rank, entry in enumerate(present)
            if entry.dp_rank >= dp_size
        ]
        collect_ranks = []
        for dp_rank in range(dp_size):
            members = [rank for rank, entry in enumerate(present) if entry.dp_rank == dp_rank]
            collect = [rank for rank in members if present[rank].is_collect]
            if not members:
                problems.append(f"no rank registered dp_rank {dp_rank} (dp_size is {dp_size})")
            elif len(collect) != 1:
                problems.append(
                    f"dp_rank {dp_rank} (ranks {members}) has collect ranks {collect}, expected exactly one rank"
                )
            else:
                collect_ranks.append(collect[0])
        if problems:
            raise ValueError(f"mesh {name!r}: " + "; ".join(problems))
        return cls(dp_ranks=tuple(e.dp_rank for e in present), collect_ranks=tuple(collect_ranks))


class DeviceMeshLike(Protocol):
    """The part of `torch.distributed.device_mesh.DeviceMesh` that this package reads."""

    @property
    def mesh_dim_names(self) -> tuple[str, ...] | None: ...

    @property
    def shape(self) -> tuple[int, ...]: ...

    def get_coordinate(self) -> Sequence[int] | None: ...


def entry_of_device_mesh(
    mesh_name: str, device_mesh: DeviceMeshLike | Any, data_axes: Sequence[str], collect_at: Mapping[str, int]
) -> MeshEntry:
    """Return this rank's place. Its dp_rank is the row-major index over `data_axes`, in the given order.

    The rank is collected if its coordinate on every other axis is `collect_at[axis]` (default 0; negative values count
    from the end, so `{"pp": -1}` is the last pipeline stage).

    Raises:
        ValueError: an unknown axis, an axis in both `data_axes` and `collect_at`, a coordinate out of range, or a rank
            outside the device mesh.
        TypeError: `data_axes` is a string.
    """
    if isinstance(data_axes, str):
        raise TypeError(
            f"mesh {mesh_name!r}: data_axes must be a list of axis names, got {data_axes!r}; write [{data_axes!r}]"
        )
    names = tuple(device_mesh.mesh_dim_names or ())
    unknown = [axis for axis in (*data_axes, *collect_at) if axis not in names]
    if unknown:
        raise ValueError(f"mesh {mesh_name!r}: the device mesh has no axes {unknown}; its axes are {list(names)}")
    both = [axis for axis in data_axes if axis in collect_at]
    if both or len(set(data_axes)) != len(data_axes):
        raise ValueError(
            f"mesh {mesh_name!r}: each axis must be named once in data_axes or in collect_at, got data_axes "
            f"{list(data_axes)} and collect_at {dict(collect_at)}"
        )
    coordinate = device_mesh.get_coordinate()
    if coordinate is None:
        raise ValueError(
            f"mesh {mesh_name!r}: this rank is outside the device mesh of shape {device_mesh.shape}; register the mesh "
            "with register_dispatch_collect_info on ranks that the device mesh leaves out"
        )
    at = dict(zip(names, coordinate, strict=True))
    sizes = dict(zip(names, device_mesh.shape, strict=True))
    outside = [axis for axis, index in collect_at.items() if not -sizes[axis] <= index < sizes[axis]]
    if outside:
        raise ValueError(
            f"mesh {mesh_name!r}: collect_at {dict(collect_at)} is out of range on axes {outside}; "
            f"axis sizes are {sizes}"
        )
    dp_rank = 0
    for axis in data_axes:
        dp_rank = dp_rank * sizes[axis] + at[axis]
    dp_size = math.prod(sizes[axis] for axis in data_axes)
    others = [axis for axis in names if axis not in data_axes]
    is_collect = all(at[axis] == collect_at.get(axis, 0) % sizes[axis] for axis in others)
    return MeshEntry(dp_rank=dp_rank, is_collect=is_collect, dp_size=dp_size)
