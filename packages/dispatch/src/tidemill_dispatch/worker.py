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

    def register_dispatch_collect_info(
        self, mesh_name: str, dp_rank: int, is_collect: bool, *, dp_size: int | None = None
    ) -> None:
        """Says which shard of a batch this rank gets in calls over `mesh_name`, and whether its result is collected.

        Every rank of the group must register the mesh, every dp_rank from 0 must be there, exactly one rank of each
        dp_rank must collect, and the ranks that say `dp_size` must agree; the group checks that at the first call over
        the mesh. Without `dp_size` it is one more than the highest dp_rank.

        Raises:
            ValueError: a dp_rank that is negative or not below dp_size, or the mesh is registered already with other
                values.
        """
        if dp_rank < 0 or (dp_size is not None and dp_rank >= dp_size):
            below = "" if dp_size is None else f" and below dp_size {dp_size}"
            raise ValueError(f"mesh {mesh_name!r}: dp_rank must be 0 or more{below}, got {dp_rank} on rank {self.rank}")
        entry = MeshEntry(dp_rank=dp_rank, is_collect=is_collect, dp_size=dp_size)
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
            TypeError: `data_axes` is one string.
        """
        entry = entry_of_device_mesh(mesh_name, device_mesh, data_axes, {} if collect_at is None else collect_at)
        self.register_dispatch_collect_info(mesh_name, entry.dp_rank, entry.is_collect, dp_size=entry.dp_size)

    def registered_meshes(self) -> dict[str, MeshEntry]:
        """This rank's entry of every mesh registered so far (a copy)."""
        return dict(self._mesh_entries)
