"""Where the ranks of a group stand in a named mesh, seen from the data."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True, kw_only=True, slots=True)
class MeshEntry:
    """One rank's place: which shard of a batch it gets, and whether its result is the one that is collected.

    `dp_size` is the number of shards as this rank knows it, None if it was not told.
    """

    dp_rank: int
    is_collect: bool
    dp_size: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class MeshLayout:
    """All ranks' places in one mesh, checked.

    Attributes:
        dp_ranks: dp_rank by rank, length world_size.
        collect_ranks: the rank whose result is collected, by dp_rank, length dp_size.
    """

    dp_ranks: tuple[int, ...]
    collect_ranks: tuple[int, ...]

    @property
    def dp_size(self) -> int:
        return len(self.collect_ranks)

    @classmethod
    def of_all_ranks(cls, world_size: int) -> "MeshLayout":
        """The mesh of a group in which every rank has a shard of its own."""
        ranks = tuple(range(world_size))
        return cls(dp_ranks=ranks, collect_ranks=ranks)

    @classmethod
    def from_entries(cls, name: str, entries: Sequence[MeshEntry | None]) -> "MeshLayout":
        """Checks what the ranks registered; `entries[rank]` is None for a rank that did not register this mesh.

        Raises:
            ValueError: a rank registered nothing, the ranks do not agree on dp_size, a dp_rank is missing or not
                below dp_size, or a dp_rank does not have exactly one collect rank; the text names the mesh and the
                ranks at fault.
        """
        absent = [rank for rank, entry in enumerate(entries) if entry is None]
        present = [entry for entry in entries if entry is not None]
        if absent:
            raise ValueError(
                f"mesh {name!r}: ranks {absent} of {len(entries)} did not register it; "
                "call register_mesh or register_dispatch_collect_info on every rank"
            )
        told = {rank: entry.dp_size for rank, entry in enumerate(present) if entry.dp_size is not None}
        if len(set(told.values())) > 1:
            raise ValueError(f"mesh {name!r}: the ranks do not agree on dp_size; by rank it is {told}")
        dp_size = next(iter(told.values()), 1 + max(entry.dp_rank for entry in present))
        problems = [
            f"rank {rank} has dp_rank {entry.dp_rank}, which is not below dp_size {dp_size}"
            for rank, entry in enumerate(present)
            if entry.dp_rank >= dp_size
        ]
        collect_ranks = []
        for dp_rank in range(dp_size):
            members = [rank for rank, entry in enumerate(present) if entry.dp_rank == dp_rank]
            collect = [rank for rank in members if present[rank].is_collect]
            if not members:
                problems.append(f"dp_rank {dp_rank} is registered by no rank (dp_size is {dp_size})")
            elif len(collect) != 1:
                problems.append(
                    f"dp_rank {dp_rank} (ranks {members}) has collect ranks {collect}, expected exactly one"
                )
            else:
                collect_ranks.append(collect[0])
        if problems:
            raise ValueError(f"mesh {name!r}: " + "; ".join(problems))
        return cls(dp_ranks=tuple(e.dp_rank for e in present), collect_ranks=tuple(collect_ranks))


class DeviceMeshLike(Protocol):
    """The part of `torch.distributed.device_mesh.DeviceMesh` that is read."""

    @property
    def mesh_dim_names(self) -> tuple[str, ...] | None: ...

    @property
    def shape(self) -> tuple[int, ...]: ...

    def get_coordinate(self) -> Sequence[int] | None: ...


def entry_of_device_mesh(
    mesh_name: str, device_mesh: DeviceMeshLike | Any, data_axes: Sequence[str], collect_at: Mapping[str, int]
) -> MeshEntry:
    """This rank's place: the row-major index over `data_axes`, in the order given.

    The rank is the collect rank of its dp_rank if its coordinate on every other axis is `collect_at[axis]` (default 0;
    negative counts from the end, so `{"pp": -1}` is the last pipeline stage).

    Raises:
        ValueError: an axis that the mesh does not have, an axis both data and collect, a coordinate out of range, or a
            rank outside the mesh.
        TypeError: `data_axes` is one string.
    """
    if isinstance(data_axes, str):
        raise TypeError(f"mesh {mesh_name!r}: data_axes must be a list of axis names, got {data_axes!r}; write [...]")
    names = tuple(device_mesh.mesh_dim_names or ())
    unknown = [axis for axis in (*data_axes, *collect_at) if axis not in names]
    if unknown:
        raise ValueError(f"mesh {mesh_name!r}: the device mesh has no axes {unknown}; it has {list(names)}")
    both = [axis for axis in data_axes if axis in collect_at]
    if both or len(set(data_axes)) != len(data_axes):
        raise ValueError(
            f"mesh {mesh_name!r}: data_axes {list(data_axes)} repeats an axis or shares {both} with collect_at"
        )
    coordinate = device_mesh.get_coordinate()
    if coordinate is None:
        raise ValueError(f"mesh {mesh_name!r}: this rank is not part of the device mesh of shape {device_mesh.shape}")
    at = dict(zip(names, coordinate, strict=True))
    sizes = dict(zip(names, device_mesh.shape, strict=True))
    outside = [axis for axis, index in collect_at.items() if not -sizes[axis] <= index < sizes[axis]]
    if outside:
        raise ValueError(
            f"mesh {mesh_name!r}: collect_at {dict(collect_at)} is out of range on axes {outside} of {sizes}"
        )
    dp_rank = 0
    for axis in data_axes:
        dp_rank = dp_rank * sizes[axis] + at[axis]
    dp_size = math.prod(sizes[axis] for axis in data_axes)
    others = [axis for axis in names if axis not in data_axes]
    is_collect = all(at[axis] == collect_at.get(axis, 0) % sizes[axis] for axis in others)
    return MeshEntry(dp_rank=dp_rank, is_collect=is_collect, dp_size=dp_size)
