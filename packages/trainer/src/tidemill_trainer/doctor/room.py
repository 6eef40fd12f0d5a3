"""Whether the nodes of a cluster have room for the processes of a run."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import ray

from tidemill_trainer.config import Config
from tidemill_trainer.doctor.finding import Finding
from tidemill_trainer.run_config import RunConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeResources:
    """What Ray may reserve on a node, whether or not it is free."""

    name: str
    num_cpus: float
    num_gpus: float


def node_resources() -> list[NodeResources]:
    """Return the resources of the nodes of the cluster to which this process has connected."""
    return [
        NodeResources(
            name=f"{node['NodeManagerHostname']} ({node['NodeManagerAddress']})",
            num_cpus=node["Resources"].get("CPU", 0.0),
            num_gpus=node["Resources"].get("GPU", 0.0),
        )
        for node in ray.nodes()
        if node["Alive"]
    ]


def processes(config: RunConfig, *, has_training: bool = True) -> dict[str, int]:
    """Return the processes of a run by the key that sets their number; Ray reserves a CPU for each."""
    numbers = config.training_workers() if has_training else {}
    if isinstance(config, Config):
        numbers |= {
            "rollout.num_engines": config.rollout.num_engines,
            "episode.num_workers": config.episode.num_workers,
        }
    return numbers


def check_room(required: Mapping[str, int], nodes: Sequence[NodeResources]) -> list[Finding]:
    """Check that the cluster has a CPU for each process of a run.

    Args:
        required: number of processes, by key.
        nodes: nodes of the cluster.
    """
    total, present = sum(required.values()), sum(node.num_cpus for node in nodes)
    if total <= present:
        return []
    parts = ", ".join(f"{number} for {key}" for key, number in required.items())
    have = ", ".join(f"{node.name} has {node.num_cpus:g} CPUs and {node.num_gpus:g} GPUs" for node in nodes)
    return [
        Finding(
            node="the cluster",
            cause=f"the run requires {total} CPUs, {parts}, but {have}: {total - present:g} CPUs are missing",
            remedy="lower these numbers, add nodes, or start Ray with a larger --num-cpus, which is only the number of "
            "processes that Ray starts",
        )
    ]
