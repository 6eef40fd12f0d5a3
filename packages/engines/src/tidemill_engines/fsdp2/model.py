"""Create a causal language model or vision-language model, and shard it."""

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
    PretrainedConfig,
    PreTrainedModel,
)

from tidemill_engines.attention.packed import (
    HAS_CUDNN,
    NAME,
    check_attention,
    check_packed_attention,
    register_attention,
)
from tidemill_engines.batch.multi_modal import MODEL_TYPES
from tidemill_engines.config import ModelConfig, Recompute
from tidemill_engines.fsdp2.config import FSDP2Config

_OTHER_OUTPUT = {"prophetnet"}
"""Model types of transformers that compute logits from another output of the backbone than `last_hidden_state`."""
_log = logging.getLogger(__name__)


def build_model(config: ModelConfig) -> PreTrainedModel:
    """Create the model on the meta device in `config.dtype`, with the configured attention.

    Raises:
        FileNotFoundError: `config.path` is not a folder with a `config.json`.
        ValueError: the checkpoint is quantized, or its model type, attention or head is not supported.
    """
    if not (Path(config.path) / "config.json").is_file():
        raise FileNotFoundError(
            f"expected a local folder with a Hugging Face model, but {config.path!r} has no config.json; "
            "download one first, for example with `hf download ORG/MODEL --local-dir FOLDER`"
        )
    hf_config = AutoConfig.from_pretrained(config.path, trust_remote_code=config.trust_remote_code)
    sees_images = hf_config.model_type in MODEL_TYPES
    if hf_config.to_dict().get("quantization_config") is not None:
        raise ValueError(f"{config.path} is quantized, which training does not support; use a bfloat16 checkpoint")
    library_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(hf_config), None)
    if not (sees_images or library_class is not None or config.trust_remote_code):
        raise ValueError(
            f"{config.path} contains a {hf_config.model_type} model; use a causal language model of transformers, or a "
            f"vision-language model of type {', '.join(MODEL_TYPES)}"
        )
    if library_class is not None:  # some fail while they are created
        _check_class(library_class, hf_config, config.attn_implementation)
    implementation: str | dict[str, str] = config.attn_implementation
    if implementation == "varlen":
        register_attention()
        implementation = NAME
        if sees_images:  # attention within images is bidirectional
            implementation = {"": NAME, "text_config": NAME, "vision_config": "sdpa"}
    auto_class = AutoModelForImageTextToText if sees_images else AutoModelForCausalLM
    with torch.device("meta"):
        model = auto_class.from_config(
            hf_config,
            dtype=getattr(torch, config.dtype),
            attn_implementation=implementation,
            trust_remote_code=config.trust_remote_code,
        )
    _check_class(type(model), hf_config, config.attn_implementation)
    _check_head(model)
    _keep_buffers(model)
    if config.gradient_checkpointing:
        recompute_layers(model, config.recompute)
    if config.compile_layers:
        compile_layers(model)
    return model


def _check_class(model_class: type[PreTrainedModel], hf_config: PretrainedConfig, attention: str) -> None:
    check_attention(hf_config, is_stateful=model_class._is_stateful)
    if attention == "varlen":
        check_packed_attention(hf_config, is_supported=model_class._supports_attention_backend)


def _check_head(model: PreTrainedModel) -> None:
    """Check that the model is a backbone and output embeddings, which are computed apart.

    Raises:
        ValueError: it has no backbone of its own, or a parameter is in neither of them.
    """
    backbone, head = model.base_model, model.get_output_embeddings()
    if backbone is model or model.config.model_type in _OTHER_OUTPUT:
        raise ValueError(
            f"{type(model).__name__} has no backbone (base_model_prefix) whose last_hidden_state is the input of its "
            "output embeddings; use another model"
        )
    parts = (backbone,) if head is None else (backbone, head)
    known = {id(param) for part in parts for param in part.parameters()}
    others = [name for name, param in model.named_parameters() if id(param) not in known]
    if others:
        raise ValueError(
            f"{type(model).__name__} has parameters outside of its backbone and output embeddings, which the engine "
            f"would not compute: {', '.join(others[:4])}; use a model without them"
        )


def _keep_buffers(model: PreTrainedModel) -> None:
    """Give the buffers that transformers keeps in float32, such as biases of routers, this dtype, also in bfloat16."""
    kept = model._keep_in_fp32_modules_strict or ()
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name in kept:
                setattr(module, name, buffer.float())


def compile_layers(model: PreTrainedModel) -> None:
    """Compile each layer at its first call, for any number of tokens.

    From then on torch compiles numbers of modules, such as the epsilon of a norm, as constants, everywhere in this
    process. Otherwise they are inputs on the CPU, and each is converted by a kernel of the CPU; before it compiles the
    first of these, torch tries the vector instructions of the CPU, which took 50 s.

    Also everywhere in this process, kernels do not depend on whether there are few tokens. Otherwise torch 2.11 fuses
    the two reductions of a norm's backward pass on a GPU only for many tokens, and compiles each layer again when a
    micro-batch first has fewer: an 8B model took 19 s for that, in its third step.
    """
    from torch._dynamo import config as dynamo
    from torch._inductor import config as inductor

    dynamo.specialize_float = True
    inductor.triton.mix_order_reduction_non_strict_mode = True
    for layer in decoder_layers(model):
        layer.compile(dynamic=True)


def recompute_layers(model: PreTrainedModel, recompute: Recompute) -> None:
    """Let each layer keep only its inputs, and recompute its activations in the backward pass.

    It wraps the layer's `forward`, so a compiled layer includes it and omits unused results.

    Raises:
        ValueError: transformers does not list the layer classes of the model.
    """
    layers = decoder_layers(model)
    if not layers:
        raise ValueError(
            f"ModelConfig.gradient_checkpointing requires layer classes, but {type(model).__name__} lists none in "
            "_no_split_modules; set it to False"
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
    """Return the expensive operations: matrix products and attention."""
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
    """Exclude the parameters whose names match a pattern from training.

    Raises:
        ValueError: a pattern matches no parameter.
    """
    names = dict(model.named_parameters())
    for pattern in patterns:
        chosen = [param for name, param in names.items() if fnmatchcase(name, pattern)]
        if not chosen:
            raise ValueError(
                f"ModelConfig.frozen: {pattern!r} matches no parameter; names are, for example, "
                f"{', '.join(list(names)[:3])}"
            )
        for param in chosen:
            param.requires_grad_(False)


def decoder_layers(model: PreTrainedModel, classes: Sequence[str] = ()) -> list[torch.nn.Module]:
    """Return the modules of `classes`, or else those of transformers' `_no_split_modules`, in order.

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
    """Shard the model in place, layer by layer.

    Gradients are summed over the ranks, not averaged, as a loss is normalized by a count over the global batch.
    """
    policy = MixedPrecisionPolicy(
        param_dtype=getattr(torch, config.param_dtype), reduce_dtype=getattr(torch, config.reduce_dtype)
    )
    offload = CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda") if config.offload_policy else OffloadPolicy()
    layers = decoder_layers(model, config.wrap_classes)
    if not layers:
        _log.warning(
            "%s has no layers of _no_split_modules; it is sharded as one unit, which all-gathers all weights at once. "
            "Set FSDP2Config.wrap_classes to the classes of its layers",
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
        if mesh.size() > 1:  # with one rank the default factor is 1 and avoids a copy
            module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)  # the default reduction requires NCCL


def fsdp_modules(model: torch.nn.Module) -> list[FSDPModule]:
    return [module for module in model.modules() if isinstance(module, FSDPModule)]
