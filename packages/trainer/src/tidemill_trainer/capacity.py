"""Whether the processes of a run have room on the nodes of a Ray cluster."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

from tidemill_trainer.config_file import ConfigError

_ROUNDING = 1e-6  # of sums of fractions

Resources = Mapping[str, float]
"""Amounts of "CPU" and "GPU"."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Demand:
    """Processes of one kind.

    Attributes:
        key: configuration key of their number.
        num_processes: their number.
        num_nodes: number of nodes over which they are spread equally; None: each is on any node.
        resources: resources of each of them.
    """

    key: str
    num_processes: int
    num_nodes: int | None
    resources: Resources

    @classmethod
    def of(cls, key: str, num_processes: int, num_gpus: float, *, num_nodes: int | None = None) -> Self:
        """Return the demand of processes with one CPU and `num_gpus` each."""
        resources = {"CPU": 1.0, "GPU": num_gpus}
        return cls(key=key, num_processes=num_processes, num_nodes=num_nodes, resources=resources)


def check_capacity(nodes: Mapping[str, Resources], demands: Sequence[Demand]) -> None:
    """Check that the nodes have room for all processes, which are placed in this order.

    Ray itself would wait. Other runs in the cluster are not considered.

    Args:
        nodes: resources of each node, by its name.
        demands: the processes.

    Raises:
        ConfigError: they do not; the message has what each node lacks.
    """
    free = {name: dict(resources) for name, resources in nodes.items()}
    for demand in demands:
        is_spread = demand.num_nodes is not None
        num_places = demand.num_processes if demand.num_nodes is None else demand.num_nodes
        share = demand.num_processes // num_places
        needed = {kind: share * amount for kind, amount in demand.resources.items() if amount > 0}
        used: set[str] = set()
        for _ in range(num_places):
            fitting = [name for name in free if not _missing(needed, free[name]) and not (is_spread and name in used)]
            if not fitting:
                raise ConfigError(_no_room(demand, needed, free, used if is_spread else set()))
            chosen = min(fitting, key=lambda name: sorted(free[name].items(), reverse=True))  # the fullest, as Ray
            used.add(chosen)
            for kind, amount in needed.items():
                free[chosen][kind] -= amount


def _missing(needed: Resources, free: Resources) -> dict[str, float]:
    lacks = {kind: amount - free.get(kind, 0.0) for kind, amount in needed.items()}
    return {kind: amount for kind, amount in lacks.items() if amount > _ROUNDING}


def _no_room(demand: Demand, needed: Resources, free: Mapping[str, Resources], used: set[str]) -> str:
    where = "on one node" if demand.num_nodes is None else f"on each of {demand.num_nodes} nodes (trainer.nnodes)"
    lines = [
        f"the Ray cluster has no room for {demand.key}={demand.num_processes}: expected {_text(needed)} {where}, got "
        "these nodes:"
    ]
    for name, left in free.items():
        lacks = _missing(needed, left)
        state = "has its part" if name in used else f"{_text(lacks)} missing" if lacks else "has room"
        lines.append(f"  {name}: {_text(left)} left for it, {state}")
    return "\n".join(
        [*lines, "Start Ray with more nodes or resources (see trainer.ray_address), or lower the number of processes."]
    )


def _text(resources: Resources) -> str:
    return ", ".join(f"{amount:g} {kind}" for kind, amount in sorted(resources.items())) or "nothing"
