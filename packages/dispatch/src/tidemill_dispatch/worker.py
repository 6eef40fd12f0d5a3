"""Base class of workers."""

import os
from collections.abc import Mapping, Sequence
from typing import Any, Self

from tidemill_dispatch.mesh import DeviceMeshLike, MeshEntry, entry_of_device_mesh


class Worker:
    """Base class of workers; one instance runs on each rank of a group.

    Attributes:
        rank: rank in the group, from the environment variable RANK (0 outside a group).
        world_size: number of ranks in the group, from WORLD_SIZE (1 outside a group).

    All state is on the instance: two workers in one process share nothing. A subclass does not have to call
    `super().__init__()`.
    """

    rank: int
    world_size: int
    _mesh_entries: dict[str, MeshEntry]

    def __new__(cls, *_args: Any, **_kwargs: Any) -> Self:
        self = super().__new__(cls)
        self.rank = int(os.environ.get("RANK", "0"))
        self.world_size = int(os.environ.get("WORLD_SIZE", "1"))
        self._mesh_entries = {}
        return self

    def register_dispatch_collect_info(
        self, mesh_name: str, dp_rank: int, is_collect: bool, *, dp_size: int | None = None
    ) -> None:
        """Register which shard of a batch this rank receives in calls over `mesh_name`, and whether it is collected.

        Requirements, which the group validates at the first call over the mesh: every rank registers the mesh; each
        dp_rank from 0 to dp_size - 1 exists; exactly one rank of each dp_rank is collected; all registered `dp_size`
        are equal. `dp_size` defaults to the highest dp_rank plus one.

        Raises:
            ValueError: dp_rank is negative or not below dp_size, or the mesh is already registered with other values.
        """
        if dp_rank < 0 or (dp_size is not None and dp_rank >= dp_size):
            limit = "" if dp_size is None else f" and < dp_size {dp_size}"
            raise ValueError(f"mesh {mesh_name!r}: dp_rank must be >= 0{limit}, got {dp_rank} on rank {self.rank}")
        entry = MeshEntry(dp_rank=dp_rank, is_collect=is_collect, dp_size=dp_size)
        known = self._mesh_entries.setdefault(mesh_name, entry)
        if known != entry:
            raise ValueError(
                f"mesh {mesh_name!r} is already registered on rank {self.rank} as {known}, got {entry}; "
                "register it once, or use another mesh name"
            )

    def register_mesh(
        self,
        mesh_name: str,
        device_mesh: DeviceMeshLike | Any,
        data_axes: Sequence[str],
        *,
        collect_at: Mapping[str, int] | None = None,
    ) -> None:
        """Register `mesh_name` from a torch `DeviceMesh` with named axes.

        Batches are split over `data_axes` (row-major in the given order) and replicated over the other axes. The rank
        at coordinate `collect_at[axis]` (default 0) of every other axis is collected. Use `collect_at={"pp": -1}` for
        results of the last pipeline stage.

        Raises:
            ValueError: an unknown axis, a rank outside the device mesh, or as `register_dispatch_collect_info`.
            TypeError: `data_axes` is a string.
        """
        entry = entry_of_device_mesh(mesh_name, device_mesh, data_axes, {} if collect_at is None else collect_at)
        self.register_dispatch_collect_info(mesh_name, entry.dp_rank, entry.is_collect, dp_size=entry.dp_size)

    def registered_meshes(self) -> dict[str, MeshEntry]:
        """Return this rank's entry of every registered mesh (a copy)."""
        return dict(self._mesh_entries)
