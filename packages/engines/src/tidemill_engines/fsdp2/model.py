"""Making a causal language model, which may see images, and sharding it."""

import importlib
import logging
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedModel,
)

from tidemill_engines.attention.packed import HAS_CUDNN, NAME, register_attention
from tidemill_engines.batch.multi_modal import MODEL_TYPES
from tidemill_engines.config import ModelConfig, Recompute
from tidemill_engines.fsdp2.config import FSDP2Config

_log = logging.getLogger(__name__)


def build_model(config: ModelConfig) -> PreTrainedModel:
    """Makes the model without memory (on the meta device) in `config.dtype`, with the attention that the config names.

    Raises:
        FileNotFoundError: `config.path` is not a folder with a `config.json`.
        ValueError: the checkpoint is quantized, or of no causal language model.
    """
    if not (Path(config.path) / "config.json").is_file():
        raise FileNotFoundError(
            f"expected a local folder with a Hugging Face model, but {config.path!r} has no config.json; "
            "download one first, for example with `hf download ORG/MODEL --local-dir FOLDER`"
        )
    hf_config = AutoConfig.from_pretrained(config.path, trust_remote_code=config.trust_remote_code)
    sees_images = hf_config.model_type in MODEL_TYPES
    implementation: str | dict[str, str] = config.attn_implementation
    if implementation == "varlen":
        register_attention()
        implementation = NAME
        if sees_images:  # images attend in both directions, each by itself
            implementation = {"": NAME, "text_config": NAME, "vision_config": "sdpa"}
    if hf_config.to_dict().get("quantization_config") is not None:
        raise ValueError(f"{config.path} is quantized, which is not trained here; use the checkpoint in bfloat16")
    if not (sees_images or type(hf_config) in MODEL_FOR_CAUSAL_LM_MAPPING or config.trust_remote_code):
        raise ValueError(
            f"{config.path} holds a {hf_config.model_type}, which transformers has no causal language model of; of "
            f"models that see images, {', '.join(MODEL_TYPES)} can be trained"
        )
    auto_class = AutoModelForImageTextToText if sees_images else AutoModelForCausalLM
    with torch.device("meta"):
        model = auto_class.from_config(
            hf_config,
            dtype=getattr(torch, config.dtype),
            attn_implementation=implementation,
            trust_remote_code=config.trust_remote_code,
        )
    model.config.use_cache = False
    if config.gradient_checkpointing:
        recompute_layers(model, config.recompute)
    if config.compile_layers:
        for layer in decoder_layers(model):
            layer.compile(dynamic=True)
    return model


def recompute_layers(model: PreTrainedModel, recompute: Recompute) -> None:
    """Has each layer keep its inputs, and recompute in the backward pass what else that needs.

    It happens within a layer's `forward`, so that a compiled layer knows of it, and leaves out what nobody needs.

    Raises:
        ValueError: transformers does not say what the layers of the model are.
    """
    layers = decoder_layers(model)
    if not layers:
        raise ValueError(
            f"ModelConfig.gradient_checkpointing: {type(model).__name__} does not name its layers (_no_split_modules)"
        )
    settings: dict[str, Any] = {"use_reentrant": False}
    if recompute == "selective":
        settings["context_fn"] = partial(create_selective_checkpoint_contexts, _heavy_operations())
    for layer in layers:
        layer.forward = partial(_recomputed, layer.forward, settings)


def _recomputed(forward: Callable[..., Any], settings: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    return checkpoint(forward, *args, **settings, **kwargs)


def _heavy_operations() -> list[Any]:
    """What takes long to compute: matrix products and attention."""
    importlib.import_module("torch.nn.attention.varlen")  # registers the operation below
    aten = torch.ops.aten
    of_cudnn = []
    if HAS_CUDNN:
        importlib.import_module("tidemill_engines.attention.cudnn")
        of_cudnn.append(torch.ops.tidemill.cudnn_attention.default)
    return [
        aten.mm.default,
        aten.bmm.default,
        aten.addmm.default,
        aten._grouped_mm.default,
        aten._scaled_dot_product_flash_attention.default,
        aten._scaled_dot_product_efficient_attention.default,
        aten._scaled_dot_product_cudnn_attention.default,
        aten._scaled_dot_product_flash_attention_for_cpu.default,
        torch.ops.torch_attn._varlen_attn.default,
        *of_cudnn,
    ]


def freeze(model: PreTrainedModel, patterns: Sequence[str]) -> None:
    """Excludes the parameters whose names fit a pattern from training.

    Raises:
        ValueError: a pattern fits no parameter.
    """
    names = dict(model.named_parameters())
    for pattern in patterns:
        chosen = [param for name, param in names.items() if fnmatchcase(name, pattern)]
        if not chosen:
            raise ValueError(
                f"ModelConfig.frozen: {pattern!r} fits no parameter; they are named like {', '.join(list(names)[:3])}"
            )
        for param in chosen:
            param.requires_grad_(False)


def decoder_layers(model: PreTrainedModel, classes: Sequence[str] = ()) -> list[torch.nn.Module]:
    """The modules of `classes`, or else those that transformers says must not be split, in order.

    Raises:
        ValueError: the model has no module of one of `classes`.
    """
    names = set(classes)
    missing = names - {type(module).__name__ for module in model.modules()}
    if missing:
        raise ValueError(
            f"FSDP2Config.wrap_classes: {type(model).__name__} has no {', '.join(sorted(missing))}; it has "
            + ", ".join(sorted({type(module).__name__ for module in model.modules()}))
        )
    names |= set() if classes else set(model._no_split_modules or ())
    return [module for module in model.modules() if type(module).__name__ in names]


def shard_model(model: PreTrainedModel, mesh: DeviceMesh, config: FSDP2Config) -> None:
    """Shards the model in place, layer by layer.

    Gradients are summed over the ranks, not averaged: a loss is normalised by a count over the global batch already.
    """
    policy = MixedPrecisionPolicy(
        param_dtype=getattr(torch, config.param_dtype), reduce_dtype=getattr(torch, config.reduce_dtype)
    )
    offload = CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda") if config.offload_policy else OffloadPolicy()
    layers = decoder_layers(model, config.wrap_classes)
    if not layers:
        _log.warning(
            "%s has no layers of _no_split_modules; it is sharded as one unit, which gathers all weights at once. "
            "Name the classes of its layers in FSDP2Config.wrap_classes",
            type(model).__name__,
        )
    for module in [*layers, model]:
        fully_shard(
            module,
            mesh=mesh,
            mp_policy=policy,
            reshard_after_forward=config.reshard_after_forward,
            offload_policy=offload,
        )
    for module in fsdp_modules(model):
        if mesh.size() > 1:  # one rank divides by 1 in any case, but by none without another copy
            module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)  # the alternative is a reduction that only NCCL has


def fsdp_modules(model: torch.nn.Module) -> list[FSDPModule]:
    return [module for module in model.modules() if isinstance(module, FSDPModule)]
