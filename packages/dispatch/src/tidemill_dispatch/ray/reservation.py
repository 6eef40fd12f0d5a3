"""Resources of the cluster, reserved in Ray placement groups."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from time import monotonic
from typing import Any

import ray
from ray.util.placement_group import (
    PlacementGroup,
    get_placement_group,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy


@dataclass(frozen=True, kw_only=True, slots=True)
class Placement:
    """Reserved resources of a group. `slots[rank]` is the placement group and the bundle index of that rank."""

    slots: tuple[tuple[PlacementGroup, int], ...]
    num_cpus: float
    num_gpus: float

    def actor_options(self, rank: int) -> dict[str, Any]:
        group, index = self.slots[rank]
        strategy = PlacementGroupSchedulingStrategy(placement_group=group, placement_group_bundle_index=index)
        return {"num_cpus": self.num_cpus, "num_gpus": self.num_gpus, "scheduling_strategy": strategy}

    def remove(self) -> None:
        """Release the resources. Ray kills actors that still use them."""
        remove_placement_groups(group for group, _ in self.slots)


def remove_placement_groups(groups: Iterable[PlacementGroup]) -> None:
    """Remove placement groups, each once. Does nothing after `ray.shutdown()`: Ray would start a new cluster."""
    if ray.is_initialized():
        for group in {group.id: group for group in groups}.values():
            remove_placement_group(group)


def detached_placement_groups(user: str) -> list[PlacementGroup]:
    """Return the placement groups of the detached group `user` in this driver's Ray namespace."""
    found: list[PlacementGroup] = []
    try:
        while True:
            found.append(get_placement_group(_detached_name(user, len(found))))
    except ValueError:  # no further placement group
        return found


def _detached_name(user: str, index: int) -> str:
    return f"{user}:{index}"


class Reservation:
    """Resources of one pool, reserved from the start of the first group that uses them to the end of the last.

    Args:
        process_on_nodes: bundles per node.
        bundle: resources of each process, for example {"CPU": 1.0}.
        max_users: number of groups that may use a slot at a time.
        timeout_s: timeout of the wait for free resources, in seconds.
        distinct_nodes: whether each entry of `process_on_nodes` has a node of its own.
    """

    def __init__(
        self,
        process_on_nodes: Sequence[int],
        bundle: dict[str, float],
        max_users: int,
        timeout_s: float,
        *,
        distinct_nodes: bool,
    ):
        self._process_on_nodes = tuple(process_on_nodes)
        self.largest = max(process_on_nodes)
        self._bundle = bundle
        self._max_users = max_users
        self._timeout_s = timeout_s
        self._distinct_nodes = distinct_nodes
        self._users: list[tuple[str, frozenset[int]]] = []
        self._slots: list[tuple[PlacementGroup, int]] = []
        self._detached = False

    def acquire(self, user: str, indices: Sequence[int], *, detached: bool) -> list[tuple[PlacementGroup, int]]:
        """Return the slots `indices` for the group named `user`.

        Raises:
            RuntimeError: the resources were not free before the timeout, or other groups of this driver use the slots.
        """
        wanted = frozenset(indices)
        full = {index for index in wanted if sum(index in taken for _, taken in self._users) >= self._max_users}
        if full:
            others = [name for name, taken in self._users if taken & full]
            raise RuntimeError(
                f"the pool of group {user!r} is used by groups {others}, and its max_colocate_count is "
                f"{self._max_users}; shut them down first, raise max_colocate_count, or use another pool"
            )
        part_only = len(wanted) < sum(self._process_on_nodes)
        if (detached and part_only) or ((detached or self._detached) and self._users):
            raise RuntimeError(
                f"group {user!r} would share a pool, or use a part of one (groups in it: "
                f"{[name for name, _ in self._users]}); a detached group requires a whole pool of its own, which is "
                "released with it"
            )
        self._detached = detached
        if not self._slots:
            self._slots = self._reserve(user, detached=detached)
        self._users.append((user, wanted))
        return [self._slots[index] for index in indices]

    def release(self, user: str, indices: Sequence[int]) -> None:
        """Release the slots of `acquire`. The resources are free after the last user's release."""
        self._users.remove((user, frozenset(indices)))
        if self._users:
            return
        slots, self._slots = self._slots, []
        remove_placement_groups(group for group, _ in slots)

    def _reserve(self, user: str, *, detached: bool) -> list[tuple[PlacementGroup, int]]:
        # The largest first: a small placement group must not take the only node that fits the large one.
        order = sorted(range(len(self._process_on_nodes)), key=lambda entry: -self._process_on_nodes[entry])
        groups: dict[int, PlacementGroup] = {}
        deadline = monotonic() + self._timeout_s
        try:
            for entries in [order] if self._distinct_nodes else [[entry] for entry in order]:
                group = self._placement_group(entries, _detached_name(user, len(groups)) if detached else None)
                groups.update(dict.fromkeys(entries, group))
            for group in groups.values():
                if not group.wait(max(0.0, deadline - monotonic())):
                    raise RuntimeError(self._no_room(user))
            slots = self._sorted_by_address({entry: self._slots_of(entry, groups[entry], order) for entry in order})
        except BaseException:
            remove_placement_groups(groups.values())
            raise
        return [slot for entry in sorted(slots) for slot in slots[entry]]

    def _placement_group(self, entries: Sequence[int], detached_name: str | None) -> PlacementGroup:
        """Start to reserve the resources of one entry, or of several on a node each."""
        bundles = [self._bundle] * self._process_on_nodes[entries[0]]
        if self._distinct_nodes:  # a bundle is the whole entry, and its processes share it
            counts = [self._process_on_nodes[entry] for entry in entries]
            bundles = [{kind: count * amount for kind, amount in self._bundle.items()} for count in counts]
        return placement_group(
            bundles,
            strategy="STRICT_SPREAD" if self._distinct_nodes else "STRICT_PACK",
            name=detached_name or "",
            lifetime="detached" if detached_name else None,
        )

    def _slots_of(self, entry: int, group: PlacementGroup, order: Sequence[int]) -> list[tuple[PlacementGroup, int]]:
        count = self._process_on_nodes[entry]
        return [(group, order.index(entry) if self._distinct_nodes else index) for index in range(count)]

    def _sorted_by_address(
        self, slots: dict[int, list[tuple[PlacementGroup, int]]]
    ) -> dict[int, list[tuple[PlacementGroup, int]]]:
        """Return the slots by entry; entries of one size are in the order of their nodes' addresses.

        Ranks then find the files that an earlier run left on the local disk of their node.
        """
        addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}

        def address(entry: int) -> tuple[Any, ...]:
            group, index = slots[entry][0]
            node = placement_group_table(group)["bundles_to_node_id"][index]
            return tuple(int(p) if p.isdecimal() else p for p in addresses[node].split(".")), node, entry

        in_order: dict[int, list[tuple[PlacementGroup, int]]] = {}
        for size in set(self._process_on_nodes):
            entries = [entry for entry, count in enumerate(self._process_on_nodes) if count == size]
            in_order.update(zip(entries, (slots[e] for e in sorted(entries, key=address)), strict=True))
        return in_order

    def _no_room(self, user: str) -> str:
        have = {k: v for k, v in ray.cluster_resources().items() if k in self._bundle}
        free = {k: v for k, v in ray.available_resources().items() if k in self._bundle}
        counts = " + ".join(str(count) for count in self._process_on_nodes)
        where = f"on {len(self._process_on_nodes)} distinct nodes" if self._distinct_nodes else "by node"
        return (
            f"group {user!r} requires {counts} processes ({where}) with {self._bundle} each, not free within "
            f"{self._timeout_s:g} s; the cluster has {have}, of which {free} is free. Request less, shut down other "
            "groups, or start Ray with more resources."
        )
