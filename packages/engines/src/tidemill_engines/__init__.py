"""Training engines for language models behind one abstraction, with a modular forward_step."""

from tidemill_engines.base import BaseEngine
from tidemill_engines.config import (
    CheckpointConfig,
    EngineConfig,
    LoraConfig,
    ModelConfig,
    OptimizerConfig,
    ParamGroup,
)
from tidemill_engines.losses import LossFn, ModelOutput, Normalizer, ValueOutput, sft_loss
from tidemill_engines.metrics import Metric
from tidemill_engines.registry import EngineRegistry
from tidemill_engines.weight_shard import WeightShard

__all__ = [
    "BaseEngine",
    "CheckpointConfig",
    "EngineConfig",
    "EngineRegistry",
    "LoraConfig",
    "LossFn",
    "Metric",
    "ModelConfig",
    "ModelOutput",
    "Normalizer",
    "OptimizerConfig",
    "ParamGroup",
    "ValueOutput",
    "WeightShard",
    "sft_loss",
]
