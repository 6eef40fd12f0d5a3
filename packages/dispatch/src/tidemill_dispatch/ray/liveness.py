"""Whether the processes of workers are alive."""

from collections.abc import Sequence
from typing import Any

import ray
from ray.exceptions import RayActorError


def dead_workers(workers: Sequence[Any], timeout_s: float = 1.0) -> list[int]:
    """Return the positions of the workers whose processes have died.

    Waits at most `timeout_s` seconds for all of them together. One that runs a call for longer counts as alive.

    Args:
        workers: handles of workers, such as `RayWorkerGroup.workers`, also of several groups.
    """
    pings = {worker.tidemill_ping.remote(): position for position, worker in enumerate(workers)}
    answered, _ = ray.wait(list(pings), num_returns=len(pings), timeout=timeout_s) if pings else ([], [])
    return sorted(pings[ref] for ref in answered if _has_died(ref))


def _has_died(ping: ray.ObjectRef) -> bool:
    try:
        ray.get(ping)
    except RayActorError:
        return True
    return False
