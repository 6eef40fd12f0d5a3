"""Bucketed weight updates from a trainer into running SGLang engines."""

from tidemill_weight_update.client import AdapterClient, EngineClient, GroupLink, HoldingClient, PauseMode
from tidemill_weight_update.control.descriptor import Request
from tidemill_weight_update.lora import LoraConfig, merge_lora
from tidemill_weight_update.memory import BucketHandle
from tidemill_weight_update.send.declaration import Transfer
from tidemill_weight_update.stats import UpdateStats
from tidemill_weight_update.tensors import LocalShard
from tidemill_weight_update.updater import WeightUpdater

__all__ = [
    "AdapterClient",
    "BucketHandle",
    "EngineClient",
    "GroupLink",
    "HoldingClient",
    "LocalShard",
    "LoraConfig",
    "PauseMode",
    "Request",
    "Transfer",
    "UpdateStats",
    "WeightUpdater",
    "merge_lora",
]
__version__ = "0.1.0"
