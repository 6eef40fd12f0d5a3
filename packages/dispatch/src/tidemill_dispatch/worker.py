"""The base class of workers."""

import os
from collections.abc import Mapping, Sequence
from typing import Any, Self

from tidemill_dispatch.mesh import DeviceMeshLike, MeshEntry, entry_of_device_mesh


class Worker:
    """Base class of a user's worker; one instance runs on each rank of a group.

    Attributes:
        rank: this worker's rank in its group, from RANK (0 outside a group).
        world_size: ranks in the group, from WORLD_SIZE (1 outside a group).

    All state is on the instance: two workers in one process do not share anything. A subclass need not call
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

    def register_dispatch_collect_info(self, mesh_name: str, dp_rank: int, is_collect: bool) -> None:
        """Says which shard of a batch this rank gets in calls over `mesh_name`, and whether its result is collected.

        Every rank of the group must register the mesh, every dp_rank from 0 must be there, and exactly one rank of
        each dp_rank must collect; the group checks that at the first call over the mesh.

        Raises:
            ValueError: a negative dp_rank, or the mesh is registered already with other values.
        """
        if dp_rank < 0:
            raise ValueError(f"mesh {mesh_name!r}: dp_rank must be 0 or more, got {dp_rank} on rank {self.rank}")
        entry = MeshEntry(dp_rank=dp_rank, is_collect=is_collect)
        known = self._mesh_entries.setdefault(mesh_name, entry)
        if known != entry:
            raise ValueError(
                f"mesh {mesh_name!r} is registered on rank {self.rank} as {known}; it cannot become {entry}"
            )

    def register_mesh(
        self,
        mesh_name: str,
        device_mesh: DeviceMeshLike | Any,
        data_axes: Sequence[str],
        *,
        collect_at: Mapping[str, int] | None = None,
    ) -> None:
        """Registers `mesh_name` from a torch `DeviceMesh` with named axes.

        Batches are split over `data_axes` (row-major in the order given) and replicated over the others. The rank
        whose result is collected is the one at coordinate `collect_at[axis]` (default 0) of every other axis; results
        that are on the last pipeline stage need `collect_at={"pp": -1}`.

        Raises:
            ValueError: an unknown axis, a rank outside the mesh, or what `register_dispatch_collect_info` raises.
        """
        entry = entry_of_device_mesh(mesh_name, device_mesh, data_axes, {} if collect_at is None else collect_at)
        self.register_dispatch_collect_info(mesh_name, entry.dp_rank, entry.is_collect)

    def registered_meshes(self) -> dict[str, MeshEntry]:
        """This rank's entry of every mesh registered so far (a copy)."""
        return dict(self._mesh_entries)
