"""Worker groups of Ray actors. Requires the extra `ray`: `pip install tidemill-dispatch[ray]`."""

import importlib.util

if importlib.util.find_spec("ray") is None:
    raise ImportError("tidemill_dispatch.ray requires Ray: pip install 'tidemill-dispatch[ray]'")

from tidemill_dispatch.ray.future import CallFuture
from tidemill_dispatch.ray.group import RayWorkerGroup
from tidemill_dispatch.ray.liveness import dead_workers
from tidemill_dispatch.ray.pool import RayResourcePool, merge_resource_pool, split_resource_pool
from tidemill_dispatch.ray.rendezvous import reserve_port
from tidemill_dispatch.ray.roles import RayClassWithInitArgs, create_colocated_worker_cls

__all__ = [
    "CallFuture",
    "RayClassWithInitArgs",
    "RayResourcePool",
    "RayWorkerGroup",
    "create_colocated_worker_cls",
    "dead_workers",
    "merge_resource_pool",
    "reserve_port",
    "split_resource_pool",
]
