"""Worker groups of Ray actors. Needs the extra: `pip install tidemill-dispatch[ray]`."""

from tidemill_dispatch.ray.future import CallFuture
from tidemill_dispatch.ray.group import RayClassWithInitArgs, RayWorkerGroup
from tidemill_dispatch.ray.pool import RayResourcePool

__all__ = ["CallFuture", "RayClassWithInitArgs", "RayResourcePool", "RayWorkerGroup"]
