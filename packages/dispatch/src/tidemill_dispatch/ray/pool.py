"""Where a group's processes go: a description of the resources, and the placement groups that hold them."""

from collections.abc import Sequence
from dataclasses import dataclass

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy


@dataclass(frozen=True, kw_only=True, slots=True)
class Placement:
    """Reserved resources. `slots[rank]` is the placement group and the bundle of that rank."""

    slots: tuple[tuple[PlacementGroup, int], ...]

    def strategy(self, rank: int) -> PlacementGroupSchedulingStrategy:
        group, index = self.slots[rank]
        return PlacementGroupSchedulingStrategy(placement_group=group, placement_group_bundle_index=index)

    def remove(self) -> None:
        """Gives the resources back. What still runs on them is killed by Ray."""
        for group in {group.id: group for group, _ in self.slots}.values():
            remove_placement_group(group)


@dataclass(frozen=True, kw_only=True, slots=True)
class RayResourcePool:
    """How many processes a group has, on how many nodes, and what each of them gets.

    Attributes:
        process_on_nodes: processes per node; the processes of one entry share a node. Ranks count through the entries.
        num_cpus_per_worker, num_gpus_per_worker: what Ray reserves for each process; fractions share a device.
        placement_timeout_s: how long to wait for the resources to be free.
    """

    process_on_nodes: Sequence[int]
    num_cpus_per_worker: float = 1
    num_gpus_per_worker: float = 0
    placement_timeout_s: float = 30.0

    def __post_init__(self) -> None:
        if not self.process_on_nodes or any(count < 1 for count in self.process_on_nodes):
            raise ValueError(
                f"process_on_nodes must hold a count of at least 1 for each node, got {list(self.process_on_nodes)}"
            )
        if self.num_cpus_per_worker < 0 or self.num_gpus_per_worker < 0:
            raise ValueError(
                f"a worker's resources must be 0 or more, got num_cpus_per_worker={self.num_cpus_per_worker}, "
                f"num_gpus_per_worker={self.num_gpus_per_worker}"
            )
        if self.num_cpus_per_worker == 0 and self.num_gpus_per_worker == 0:
            raise ValueError("a worker needs some num_cpus_per_worker or num_gpus_per_worker, got 0 of both")

    @property
    def world_size(self) -> int:
        return sum(self.process_on_nodes)

    def place(self, name: str) -> Placement:
        """Reserves the resources for group `name`: one placement group per node.

        Raises:
            RuntimeError: they were not free within `placement_timeout_s`; the text says what the cluster has.
        """
        bundle = {"CPU": float(self.num_cpus_per_worker), "GPU": float(self.num_gpus_per_worker)}
        bundle = {kind: amount for kind, amount in bundle.items() if amount > 0}
        groups: list[PlacementGroup] = []
        try:
            for count in self.process_on_nodes:
                groups.append(placement_group([bundle] * count, strategy="STRICT_PACK"))
            for group in groups:
                if not group.wait(self.placement_timeout_s):
                    raise RuntimeError(self._no_room(name, bundle))
        except BaseException:
            for group in groups:
                remove_placement_group(group)
            raise
        slots = [(group, index) for group, n in zip(groups, self.process_on_nodes, strict=True) for index in range(n)]
        return Placement(slots=tuple(slots))

    def _no_room(self, name: str, bundle: dict[str, float]) -> str:
        have = {k: v for k, v in ray.cluster_resources().items() if k in ("CPU", "GPU")}
        free = {k: v for k, v in ray.available_resources().items() if k in ("CPU", "GPU")}
        counts = " + ".join(str(count) for count in self.process_on_nodes)
        return (
            f"group {name!r} needs {counts} processes (by node) of {bundle} each; they were not free within "
            f"{self.placement_timeout_s:g} s. The cluster has {have}, free are {free}. "
            "Ask for less, end other groups, or start Ray with more."
        )
