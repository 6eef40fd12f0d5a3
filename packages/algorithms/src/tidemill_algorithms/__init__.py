"""Advantages, policy losses and corrections as pure functions over ragged batches."""

from tidemill_algorithms.groups import Groups

__all__ = ["Groups"]
