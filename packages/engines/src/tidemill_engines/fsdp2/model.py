"""Making a causal language model and sharding it."""

import logging
from pathlib import Path

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from tidemill_engines import attention
from tidemill_engines.config import EngineConfig, ModelConfig

_log = logging.getLogger(__name__)


def build_model(config: ModelConfig) -> PreTrainedModel:
    """Makes the model without memory (on the meta device) in `config.dtype`, with the attention that the config names.

    Raises:
        FileNotFoundError: `config.path` is not a folder with a `config.json`.
        ValueError: the checkpoint is quantized.
    """
    if not (Path(config.path) / "config.json").is_file():
        raise FileNotFoundError(
            f"expected a local folder with a Hugging Face model, but {config.path!r} has no config.json; "
            "download one first, for example with `hf download ORG/MODEL --local-dir FOLDER`"
        )
    implementation = config.attn_implementation
    if implementation == "varlen":
        attention.register_attention()
        implementation = attention.NAME
    hf_config = AutoConfig.from_pretrained(config.path, trust_remote_code=config.trust_remote_code)
    if hf_config.to_dict().get("quantization_config") is not None:
        raise ValueError(f"{config.path} is quantized, which is not trained here; use the checkpoint in bfloat16")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            hf_config,
            dtype=getattr(torch, config.dtype),
            attn_implementation=implementation,
            trust_remote_code=config.trust_remote_code,
        )
    model.config.use_cache = False
    if config.gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


def decoder_layers(model: PreTrainedModel) -> list[torch.nn.Module]:
    """The modules that transformers says must not be split, in order."""
    names = set(model._no_split_modules or ())
    return [module for module in model.modules() if type(module).__name__ in names]


def shard_model(model: PreTrainedModel, mesh: DeviceMesh, config: EngineConfig) -> None:
    """Shards the model in place, layer by layer.

    Gradients are summed over the ranks, not averaged: a loss is normalised by a count over the global batch already.
    """
    policy = MixedPrecisionPolicy(
        param_dtype=getattr(torch, config.param_dtype), reduce_dtype=getattr(torch, config.reduce_dtype)
    )
    layers = decoder_layers(model)
    if not layers:
        _log.warning(
            "%s has no layers of _no_split_modules; it is sharded as one unit, which gathers all weights at once",
            type(model).__name__,
        )
    for layer in layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward=config.reshard_after_forward)
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=config.reshard_after_forward)
    for module in fsdp_modules(model):
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)  # the alternative is a reduction that only NCCL has


def fsdp_modules(model: torch.nn.Module) -> list[FSDPModule]:
    return [module for module in model.modules() if isinstance(module, FSDPModule)]
