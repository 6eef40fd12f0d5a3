"""Resource pools: how many processes groups have, on how many nodes, with which resources."""

from collections.abc import Sequence
from numbers import Integral

from tidemill_dispatch.ray.reservation import Placement, Reservation

_Slot = tuple[Reservation, int]
"""A reservation, and the index of a process in it."""


class RayResourcePool:
    """Processes on nodes of the cluster, for one group or for several.

    The resources are reserved when the first group starts and released when the last one stops.

    Args:
        process_on_nodes: processes per node. The processes of one entry share a node; two entries may share a node too
            if it has room. Ranks are numbered entry by entry. Entries with the same number of processes are sorted by
            the IP addresses of their nodes.
        distinct_nodes: the entries have a node each, and do not share one.
        num_cpus_per_worker, num_gpus_per_worker: resources of each process; processes with fractions share a device.
        max_colocate_count: number of groups that may use the pool at a time. Each of their workers has this fraction of
            a process's resources. With at most one GPU per process, rank r of every group is on the same device. With
            more, Ray chooses which of a process's GPUs each group has.
        placement_timeout_s: timeout of the wait for free resources, in seconds.

    Raises:
        ValueError: no nodes, a count below 1, negative or no resources, several GPUs that do not divide by
            `max_colocate_count`, or `distinct_nodes` with several groups and several processes with GPUs on a node.
        TypeError: `process_on_nodes` is no list of whole numbers.
    """

    def __init__(
        self,
        process_on_nodes: Sequence[int],
        *,
        distinct_nodes: bool = False,
        num_cpus_per_worker: float = 1,
        num_gpus_per_worker: float = 0,
        max_colocate_count: int = 1,
        placement_timeout_s: float = 30.0,
    ):
        is_list = isinstance(process_on_nodes, Sequence)
        if not is_list or not all(isinstance(count, Integral) for count in process_on_nodes):
            raise TypeError(
                "process_on_nodes must be a list with the number of processes of each node, such as [4, 4], got "
                f"{process_on_nodes!r}"
            )
        if not process_on_nodes or any(count < 1 for count in process_on_nodes):
            raise ValueError(
                f"process_on_nodes must hold a number >= 1 for each of one or more nodes, got {list(process_on_nodes)}"
            )
        if num_cpus_per_worker < 0 or num_gpus_per_worker < 0:
            raise ValueError(
                f"resources of a worker must be >= 0, got num_cpus_per_worker={num_cpus_per_worker}, "
                f"num_gpus_per_worker={num_gpus_per_worker}"
            )
        if num_cpus_per_worker == 0 and num_gpus_per_worker == 0:
            raise ValueError("num_cpus_per_worker or num_gpus_per_worker must be > 0, got 0 for both")
        if max_colocate_count < 1:
            raise ValueError(f"max_colocate_count must be >= 1, got {max_colocate_count}")
        distinct_nodes = distinct_nodes and len(process_on_nodes) > 1
        _check_gpu_share(process_on_nodes, num_gpus_per_worker, max_colocate_count, distinct_nodes=distinct_nodes)
        bundle = {"CPU": float(num_cpus_per_worker), "GPU": float(num_gpus_per_worker)}
        bundle = {kind: amount for kind, amount in bundle.items() if amount > 0}
        reservation = Reservation(
            process_on_nodes,
            bundle,
            max_colocate_count,
            placement_timeout_s,
            distinct_nodes=distinct_nodes,
        )
        self._slots: tuple[_Slot, ...] = tuple((reservation, index) for index in range(sum(process_on_nodes)))
        self.num_cpus_per_worker = num_cpus_per_worker
        self.num_gpus_per_worker = num_gpus_per_worker
        self.max_colocate_count = max_colocate_count

    @property
    def world_size(self) -> int:
        return len(self._slots)

    def place(self, name: str, *, detached: bool = False) -> Placement:
        """Reserve the resources for group `name`, if another group has not done so. Called by `RayWorkerGroup`.

        Raises:
            RuntimeError: the resources were not free before the timeout, or other groups use them.
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
        """Release the resources that `place` reserved for group `name`."""
        for reservation, indices in self._by_reservation().items():
            reservation.release(name, indices)

    def _by_reservation(self) -> dict[Reservation, list[int]]:
        """Return the process indices of each reservation. The one with the largest node is reserved first."""
        found: dict[Reservation, list[int]] = {}
        for reservation, index in sorted(self._slots, key=lambda slot: -slot[0].largest):
            found.setdefault(reservation, []).append(index)
        return found

    def _with_slots(self, slots: tuple[_Slot, ...]) -> "RayResourcePool":
        pool = object.__new__(RayResourcePool)
        pool.__dict__.update(self.__dict__)
        pool._slots = slots
        return pool


def _check_gpu_share(
    process_on_nodes: Sequence[int], num_gpus_per_worker: float, max_colocate_count: int, *, distinct_nodes: bool
) -> None:
    share = num_gpus_per_worker / max_colocate_count
    if share > 1 and not share.is_integer():
        raise ValueError(
            f"num_gpus_per_worker={num_gpus_per_worker:g} with max_colocate_count={max_colocate_count} gives "
            f"{share:g} GPUs to each worker; Ray supports whole GPUs or a fraction of one, so use a multiple of "
            "max_colocate_count, or at most max_colocate_count"
        )
    if distinct_nodes and num_gpus_per_worker > 0 and max_colocate_count > 1 and max(process_on_nodes) > 1:
        raise ValueError(
            f"distinct_nodes=True with max_colocate_count={max_colocate_count} and several processes with GPUs on a "
            "node would place ranks of one group on one GPU while others are free; use distinct_nodes=False"
        )


def split_resource_pool(pool: RayResourcePool, split_size: int | Sequence[int]) -> list[RayResourcePool]:
    """Split a pool by processes, in rank order, into parts of one size or of the given sizes.

    The parts share the reservation of the pool, which is released when no group uses any of them.

    Raises:
        ValueError: the sizes do not add up to that of the pool.
    """
    if isinstance(split_size, int):
        sizes = [split_size] * (pool.world_size // split_size) if split_size > 0 else []
    else:
        sizes = list(split_size)
    if any(size < 1 for size in sizes) or sum(sizes) != pool.world_size:
        raise ValueError(
            f"split_size must be sizes >= 1 that add up to the {pool.world_size} processes of the pool, or a divisor "
            f"of {pool.world_size}, got {split_size!r}"
        )
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    return [pool._with_slots(pool._slots[start : start + size]) for start, size in zip(starts, sizes, strict=True)]


def merge_resource_pool(first: RayResourcePool, second: RayResourcePool) -> RayResourcePool:
    """Return a pool with the processes of both, those of `first` first.

    Raises:
        ValueError: the pools' processes have different resources, or the pools share processes.
    """
    for attribute in ("num_cpus_per_worker", "num_gpus_per_worker", "max_colocate_count"):
        ours, theirs = getattr(first, attribute), getattr(second, attribute)
        if ours != theirs:
            raise ValueError(f"pools to merge must have the same {attribute}, got {ours:g} and {theirs:g}")
    shared = set(first._slots) & set(second._slots)
    if shared:
        raise ValueError(f"pools to merge must not share processes, got {len(shared)} in both")
    return first._with_slots((*first._slots, *second._slots))
