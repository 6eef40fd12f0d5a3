"""Whether the processes of a run have room on the nodes of a Ray cluster."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

from tidemill_trainer.config import Config
from tidemill_trainer.doctor.finding import Finding
from tidemill_trainer.gpus import cpus_per_engine, gpus_per_engine, on_gpu
from tidemill_trainer.roles import own_workers
from tidemill_trainer.run_config import RunConfig

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
    def of(
        cls, key: str, num_processes: int, num_gpus: float, *, num_nodes: int | None = None, num_cpus: float = 1.0
    ) -> Self:
        """Return the demand of processes with `num_cpus` and `num_gpus` each."""
        resources = {"CPU": num_cpus, "GPU": num_gpus}
        return cls(key=key, num_processes=num_processes, num_nodes=num_nodes, resources=resources)


def demands(config: RunConfig, num_gpus: float, *, has_training: bool = True, has_engines: bool = True) -> list[Demand]:
    """Return the processes of a run in the order in which they are placed.

    Args:
        config: configuration of the run, `placed` if it has engines.
        num_gpus: GPUs of the cluster.
        has_training: whether the run starts training workers.
        has_engines: whether the run starts engines and episode workers, if its configuration has some.
    """
    found: list[Demand] = []
    nnodes = config.trainer.nnodes
    if has_training:
        has_gpu = on_gpu(config.engine.device, num_gpus)
        actor, per_worker = config.actor.num_workers, config.actor.num_gpus_per_worker
        found.append(Demand.of("actor.num_workers", actor, per_worker if has_gpu else 0.0, num_nodes=nnodes))
        for role, number in own_workers(config).items() if isinstance(config, Config) else ():
            spread = math.gcd(nnodes, number)  # a role may have fewer processes
            found.append(Demand.of(f"{role}.num_workers", number, 1.0 if has_gpu else 0.0, num_nodes=spread))
    if isinstance(config, Config) and has_engines:
        found.append(engine_demand(config, num_gpus, "rollout.num_engines", config.rollout.num_engines))
        found.append(Demand.of("episode.num_workers", config.episode.num_workers, 0.0))
    return found


def engine_demand(config: Config, num_gpus: float, key: str, num_engines: int) -> Demand:
    """Return the demand of engines, each on any node of a cluster with `num_gpus` GPUs."""
    gpus = gpus_per_engine(config) if on_gpu(config.rollout.device, num_gpus) else 0.0
    return Demand.of(key, num_engines, gpus, num_cpus=cpus_per_engine(config))


def check_room(nodes: Mapping[str, Resources], demands: Sequence[Demand]) -> list[Finding]:
    """Check that the nodes have room for all processes, which are placed in this order.

    Ray itself would wait. Other runs in the cluster are not considered.

    Args:
        nodes: resources of each node, by its name.
        demands: the processes.
    """
    free = {name: dict(resources) for name, resources in nodes.items()}
    for demand in demands:
        is_spread = demand.num_nodes is not None
        num_places = demand.num_processes if demand.num_nodes is None else demand.num_nodes
        share = demand.num_processes // num_places
        needed = {kind: share * amount for kind, amount in demand.resources.items() if amount > 0}
        used: set[str] = set()
        for num_placed in range(num_places):
            fitting = [name for name in free if not _missing(needed, free[name]) and not (is_spread and name in used)]
            if not fitting:
                return [_no_room(demand, needed, free, num_placed, used if is_spread else set())]
            chosen = min(fitting, key=lambda name: sorted(free[name].items(), reverse=True))  # the fullest, as Ray
            used.add(chosen)
            for kind, amount in needed.items():
                free[chosen][kind] -= amount
    return []


def _missing(needed: Resources, free: Resources) -> dict[str, float]:
    lacks = {kind: amount - free.get(kind, 0.0) for kind, amount in needed.items()}
    return {kind: amount for kind, amount in lacks.items() if amount > _ROUNDING}


def _no_room(
    demand: Demand, needed: Resources, free: Mapping[str, Resources], num_placed: int, used: set[str]
) -> Finding:
    if demand.num_nodes is None:
        fits, where = f", only for {num_placed} of them" if num_placed else "", "on one node for each"
    else:
        fits, where = "", f"on each of {demand.num_nodes} nodes (trainer.nnodes)"
    what = f"no room for {demand.key}={demand.num_processes}{fits}: expected {_text(needed)} {where}"
    lines = [f"{what}, got these nodes:"]
    for name, left in free.items():
        lacks = _missing(needed, left)
        state = "has its part" if name in used else f"{_text(lacks)} missing" if lacks else "has room"
        lines.append(f"  {name}: {_text(left)} left for it, {state}")
    return Finding(
        node="the cluster",
        cause="\n".join(lines),
        remedy="start Ray with more nodes, or with a larger --num-cpus, which is only the number of processes, or "
        "lower the number of processes",
    )


def _text(resources: Resources) -> str:
    return ", ".join(f"{round(amount, 3):g} {kind}" for kind, amount in sorted(resources.items())) or "nothing"
