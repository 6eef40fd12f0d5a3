"""Inspection of the processes of a run on all nodes."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from tidemill_trainer.stalls.process import ProcessState, Registration, observe
from tidemill_trainer.stalls.report import InspectedProcess
from tidemill_trainer.stalls.stack import stack_trace

DRIVER = "driver"
_NODE_TIMEOUT_S = 30.0
_QUEUE_TIMEOUT_S = 1.0
_PARALLEL = 4


def inspect_node(registrations: Sequence[Registration], logs: Path) -> list[InspectedProcess]:
    """Return state and stack traces of processes on this machine and of their descendants.

    The stack traces of Ray's own processes are left out: descendants of the driver that are no worker, also not one
    that is about to start.
    """

    def inspect(state: ProcessState) -> InspectedProcess:
        is_rays = state.log == DRIVER and state.title != DRIVER and not state.title.startswith("ray::")
        return InspectedProcess(state=state, stack="" if is_rays else stack_trace(state, logs))

    with ThreadPoolExecutor(_PARALLEL) as pool:
        return list(pool.map(inspect, observe(registrations)))


def inspect_nodes(
    registrations: Sequence[Registration], logs: Path, *, here: str
) -> tuple[list[InspectedProcess], list[str]]:
    """Inspect the processes of all nodes, those of other nodes by a Ray task on each.

    Args:
        registrations: the processes.
        logs: folder of the logs.
        here: Ray's id of this node.

    Returns:
        The processes, and one line for each node that did not answer.
    """
    by_node: dict[str, list[Registration]] = defaultdict(list)
    for registration in registrations:
        by_node[registration.node].append(registration)
    processes = inspect_node(by_node.pop(here, []), logs)
    task = ray.remote(num_cpus=0, max_retries=0)(inspect_node)
    remote = {
        node: task.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)).remote(found, logs)
        for node, found in by_node.items()
    }
    unreachable = []
    for node, result in answers(remote, _NODE_TIMEOUT_S).items():
        if isinstance(result, list):
            processes += result
        else:
            unreachable.append(f"node {node}: {result}")
    return processes, unreachable


def queue_states(queues: Mapping[str, Any]) -> dict[str, str]:
    """Return the state of each queue, or that its owner does not answer.

    Args:
        queues: reference to the description of a queue, by owner.
    """
    return {owner: str(state) for owner, state in answers(queues, _QUEUE_TIMEOUT_S).items()}


def answers(refs: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
    """Return the values of references, or why there is none."""
    if not refs:
        return {}
    ready, _ = ray.wait(list(refs.values()), num_returns=len(refs), timeout=timeout_s)
    found = {}
    for name, ref in refs.items():
        try:
            found[name] = ray.get(ref) if ref in ready else f"no answer within {timeout_s:g} s"
        except RayError as error:
            found[name] = f"failed: {str(error).splitlines()[0]}"
    return found
