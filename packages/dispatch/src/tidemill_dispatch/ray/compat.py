"""verl's name of `CallFuture`, which verl has in `verl.protocol`."""

from tidemill_dispatch.ray.future import CallFuture as DataProtoFuture

__all__ = ["DataProtoFuture"]
