"""n-d mesh dispatch and collect for groups of workers.

This module is the registry and the arithmetic, and imports neither Ray nor torch; `tidemill_dispatch.ray` runs it.
"""

from tidemill_dispatch.batch import Batch, ListBatch
from tidemill_dispatch.errors import CallTimeoutError, WorkerDiedError, WorkerError
from tidemill_dispatch.mesh import MeshLayout
from tidemill_dispatch.registry import (
    Dispatch,
    DispatchMode,
    Execute,
    make_dp_compute_dataproto_dispatch_fn,
    make_nd_compute_dataproto_dispatch_fn,
    register,
    register_dispatch_mode,
)
from tidemill_dispatch.sharding import Padding, Replicate, Shard
from tidemill_dispatch.worker import Worker

__all__ = [
    "Batch",
    "CallTimeoutError",
    "Dispatch",
    "DispatchMode",
    "Execute",
    "ListBatch",
    "MeshLayout",
    "Padding",
    "Replicate",
    "Shard",
    "Worker",
    "WorkerDiedError",
    "WorkerError",
    "make_dp_compute_dataproto_dispatch_fn",
    "make_nd_compute_dataproto_dispatch_fn",
    "register",
    "register_dispatch_mode",
]
