"""Training engines for language models behind one abstraction, with a modular forward_step."""

from tidemill_engines.base.engine import BaseEngine
from tidemill_engines.config import CheckpointConfig, EngineConfig, LoraConfig, ModelConfig, OptimizerConfig, ParamGroup
from tidemill_engines.fsdp2.config import FSDP2Config
from tidemill_engines.hf_weights.shard import WeightShard
from tidemill_engines.loss.contract import LossFn, Normalizer
from tidemill_engines.loss.metrics import Metric
from tidemill_engines.loss.sft import sft_loss
from tidemill_engines.megatron.config import MegatronConfig
from tidemill_engines.model_io import ModelOutput, ValueOutput
from tidemill_engines.registry import EngineRegistry

__all__ = [
    "BaseEngine",
    "CheckpointConfig",
    "EngineConfig",
    "EngineRegistry",
    "FSDP2Config",
    "LoraConfig",
    "LossFn",
    "MegatronConfig",
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
