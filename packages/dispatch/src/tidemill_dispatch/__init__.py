"""Call a group of worker processes as one object: split batches over a mesh of ranks, collect results in order.

This module holds the modes and their arithmetic and imports neither Ray nor torch. `tidemill_dispatch.ray` runs calls
on Ray actors. `tidemill_dispatch.compat` has verl's names.
"""

from tidemill_dispatch.batch import Batch, ListBatch
from tidemill_dispatch.errors import CallTimeoutError, WorkerDiedError, WorkerError
from tidemill_dispatch.mesh import MeshLayout
from tidemill_dispatch.method import register
from tidemill_dispatch.mode import Dispatch, DispatchMode, split_over, split_over_ranks
from tidemill_dispatch.sharding import Padding, Replicate, Shard
from tidemill_dispatch.worker import Worker

__all__ = [
    "Batch",
    "CallTimeoutError",
    "Dispatch",
    "DispatchMode",
    "ListBatch",
    "MeshLayout",
    "Padding",
    "Replicate",
    "Shard",
    "Worker",
    "WorkerDiedError",
    "WorkerError",
    "register",
    "split_over",
    "split_over_ranks",
]
