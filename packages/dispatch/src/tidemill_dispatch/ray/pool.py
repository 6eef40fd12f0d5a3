"""How many processes groups get, on how many nodes, with what resources."""

from collections.abc import Sequence

from tidemill_dispatch.ray.reservation import Placement, Reservation

_Slot = tuple[Reservation, int]
"""A reservation, and the process among its processes."""


class RayResourcePool:
    """A number of processes on a number of nodes, for one group or for several.

    The resources are reserved when the first group starts and given back when the last one ends.

    Args:
        process_on_nodes: processes per node; the processes of one entry share a node, and two entries may if it has
            room. Ranks count through the entries; entries of one size are in the order of their nodes' addresses.
        num_cpus_per_worker, num_gpus_per_worker: what is reserved for each process; fractions share a device.
        max_colocate_count: how many groups may use the pool at a time. Each of their workers gets this part of a
            process's resources, so that rank r of every group is on the same device.
        placement_timeout_s: how long to wait for the resources to be free.

    Raises:
        ValueError: no nodes, a count below 1, negative or no resources, or a share of several GPUs that is no whole
            number of them.
        TypeError: `process_on_nodes` is one number.
    """

    def __init__(
        self,
        process_on_nodes: Sequence[int],
        *,
        num_cpus_per_worker: float = 1,
        num_gpus_per_worker: float = 0,
        max_colocate_count: int = 1,
        placement_timeout_s: float = 30.0,
    ):
        if isinstance(process_on_nodes, int):
            raise TypeError(
                f"process_on_nodes must be a list with a count for each node, got {process_on_nodes}; "
                f"write [{process_on_nodes}]"
            )
        if not process_on_nodes or any(count < 1 for count in process_on_nodes):
            raise ValueError(
                f"process_on_nodes must hold a count of at least 1 for each node, got {list(process_on_nodes)}"
            )
        if num_cpus_per_worker < 0 or num_gpus_per_worker < 0:
            raise ValueError(
                f"a worker's resources must be 0 or more, got num_cpus_per_worker={num_cpus_per_worker}, "
                f"num_gpus_per_worker={num_gpus_per_worker}"
            )
        if num_cpus_per_worker == 0 and num_gpus_per_worker == 0:
            raise ValueError("a worker needs some num_cpus_per_worker or num_gpus_per_worker, got 0 of both")
        if max_colocate_count < 1:
            raise ValueError(f"max_colocate_count must be at least 1, got {max_colocate_count}")
        share = num_gpus_per_worker / max_colocate_count
        if share > 1 and not share.is_integer():
            raise ValueError(
                f"{num_gpus_per_worker:g} GPUs for {max_colocate_count} groups are {share:g} for each worker, and Ray "
                "shares one GPU or gives whole ones; use a multiple of max_colocate_count, or less"
            )
        bundle = {"CPU": float(num_cpus_per_worker), "GPU": float(num_gpus_per_worker)}
        bundle = {kind: amount for kind, amount in bundle.items() if amount > 0}
        reservation = Reservation(process_on_nodes, bundle, max_colocate_count, placement_timeout_s)
        self._slots: tuple[_Slot, ...] = tuple((reservation, index) for index in range(sum(process_on_nodes)))
        self.num_cpus_per_worker = num_cpus_per_worker
        self.num_gpus_per_worker = num_gpus_per_worker
        self.max_colocate_count = max_colocate_count

    @property
    def world_size(self) -> int:
        return len(self._slots)

    def place(self, name: str, *, detached: bool = False) -> Placement:
        """Reserves the resources, unless they are already, for group `name`. For `RayWorkerGroup`.

        Raises:
            RuntimeError: they were not free in time (the text says what the cluster has), or are used by others.
        """
        slots = {}
        acquired: list[Reservation] = []
        try:
            for reservation, indices in self._by_reservation().items():
                given = reservation.acquire(name, indices, detached=detached)
                acquired.append(reservation)
                slots.update(zip([(reservation, index) for index in indices], given, strict=True))
        except BaseException:
            for reservation in acquired:
                reservation.release(name, self._by_reservation()[reservation])
            raise
        return Placement(
            slots=tuple(slots[slot] for slot in self._slots),
            num_cpus=self.num_cpus_per_worker / self.max_colocate_count,
            num_gpus=self.num_gpus_per_worker / self.max_colocate_count,
        )

    def release(self, name: str) -> None:
        """Gives back what `place` reserved for group `name`."""
        for reservation, indices in self._by_reservation().items():
            reservation.release(name, indices)

    def _by_reservation(self) -> dict[Reservation, list[int]]:
        """The processes used of each reservation, the reservation with the largest node first, as it is made first."""
        found: dict[Reservation, list[int]] = {}
        for reservation, index in sorted(self._slots, key=lambda slot: -slot[0].largest):
            found.setdefault(reservation, []).append(index)
        return found

    def _with_slots(self, slots: tuple[_Slot, ...]) -> "RayResourcePool":
        pool = object.__new__(RayResourcePool)
        pool.__dict__.update(self.__dict__)
        pool._slots = slots
        return pool


def split_resource_pool(pool: RayResourcePool, split_size: int | Sequence[int]) -> list[RayResourcePool]:
    """Splits a pool by processes, in rank order: into parts of one size, or of the sizes given.

    The parts share the pool's reservation: it is held as long as a group uses any of them.

    Raises:
        ValueError: the sizes do not add up to the pool's.
    """
    if isinstance(split_size, int):
        sizes = [split_size] * (pool.world_size // split_size) if split_size > 0 else []
    else:
        sizes = list(split_size)
    if any(size < 1 for size in sizes) or sum(sizes) != pool.world_size:
        raise ValueError(
            f"a pool of {pool.world_size} processes cannot be split by {split_size!r}: the sizes must be 1 or more "
            f"and add up to {pool.world_size}"
        )
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    return [pool._with_slots(pool._slots[start : start + size]) for start, size in zip(starts, sizes, strict=True)]


def merge_resource_pool(first: RayResourcePool, second: RayResourcePool) -> RayResourcePool:
    """One pool with the processes of both, those of `first` first.

    Raises:
        ValueError: their processes have different resources, or they share processes.
    """
    for attribute in ("num_cpus_per_worker", "num_gpus_per_worker", "max_colocate_count"):
        ours, theirs = getattr(first, attribute), getattr(second, attribute)
        if ours != theirs:
            raise ValueError(f"pools to be merged must have the same {attribute}, got {ours:g} and {theirs:g}")
    shared = set(first._slots) & set(second._slots)
    if shared:
        raise ValueError(f"the pools have {len(shared)} processes in common; merge pools that have none")
    return first._with_slots((*first._slots, *second._slots))
