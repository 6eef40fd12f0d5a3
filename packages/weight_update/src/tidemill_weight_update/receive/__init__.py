"""The engine's side of the fast path: reads buckets and copies them into the model's parameters."""

from tidemill_weight_update.receive.receiver import Receiver

__all__ = ["Receiver"]
