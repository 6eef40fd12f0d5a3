"""Bucketed weight updates from any trainer into SGLang."""

from tidemill_weight_update.client import EngineClient, PauseMode
from tidemill_weight_update.control.request import Request
from tidemill_weight_update.link.group_link import GroupLink
from tidemill_weight_update.memory.handle import BucketHandle
from tidemill_weight_update.send.shards import LocalShard
from tidemill_weight_update.stats import UpdateStats
from tidemill_weight_update.updater import WeightUpdater

__all__ = [
    "BucketHandle",
    "EngineClient",
    "GroupLink",
    "LocalShard",
    "PauseMode",
    "Request",
    "UpdateStats",
    "WeightUpdater",
]
__version__ = "0.1.0"
