"""Low-rank adapters of peft on a sharded model: only they are trained; they are exported separately or merged."""

import math
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from tidemill_engines.config import LoraConfig
from tidemill_engines.fsdp2.weights import local_box, named_weights
from tidemill_engines.hf_weights.layout import Layout
from tidemill_engines.offload import like, local_part

if TYPE_CHECKING:
    from peft import LoraConfig as PeftLoraConfig

_ADAPTER = "default"
_BASE, _FACTORS = ".base_layer.", (".lora_A.", ".lora_B.")


@dataclass(frozen=True, slots=True)
class Adapter:
    """Factors of the update of one linear layer: B [out, rank] times A [rank, in] times `scaling`."""

    a: torch.Tensor
    b: torch.Tensor
    scaling: float


def add_adapters(model: PreTrainedModel, config: LoraConfig, trainable: Sequence[str] = ()) -> None:
    """Add adapters to a model on the meta device and freeze all other parameters.

    Args:
        trainable: names of other trainable parameters, such as a new head, which gets no adapter.

    Raises:
        ImportError: peft is not installed.
        ValueError: a target module is not in the model, or is not a linear layer.
    """
    try:
        from peft import inject_adapter_in_model
        from peft.tuners.lora import Linear, LoraLayer
    except ImportError as error:
        raise ImportError(
            "ModelConfig.lora requires peft; install it with `pip install 'tidemill-engines[lora]'`"
        ) from error
    heads = sorted({name.rpartition(".")[0] for name in trainable})
    linear = _linear_layers(model) if list(config.target_modules) == ["all-linear"] else []
    inject_adapter_in_model(peft_config(config, heads, linear), model, _ADAPTER, low_cpu_mem_usage=True)
    adapted = [(name, module) for name, module in model.named_modules() if isinstance(module, LoraLayer)]
    # peft's `Linear` also adapts transformers' `Conv1D`, whose weight is transposed.
    is_linear = [isinstance(each, Linear) and isinstance(each.get_base_layer(), torch.nn.Linear) for _, each in adapted]
    others = [name for (name, _), is_one in zip(adapted, is_linear, strict=True) if not is_one]
    if isinstance(model.get_output_embeddings(), LoraLayer):
        raise ValueError("LoraConfig.target_modules must not include the head of the model; train it as a whole")
    if others:
        raise ValueError(f"LoraConfig.target_modules must be linear layers; {', '.join(others[:3])} are not")
    dtype = model.dtype
    for name, param in model.named_parameters():
        param.data = param.data.to(dtype)  # an FSDP group has one dtype
        param.requires_grad_(is_adapter(name) or name in trainable)


def _linear_layers(model: PreTrainedModel) -> list[str]:
    """Return the linear layers except the head. To its own "all-linear", peft adds the fused experts and the router."""
    head = model.get_output_embeddings()
    modules = model.named_modules()
    return [name for name, module in modules if isinstance(module, torch.nn.Linear) and module is not head]


def set_adapters_disabled(model: PreTrainedModel, disabled: bool) -> None:
    """Compute without or with the adapters.

    peft's `enable_adapters` also sets `requires_grad` of the parameters, on which sharding and optimizer depend.
    """
    from peft.tuners.lora import LoraLayer

    for module in model.modules():
        if isinstance(module, LoraLayer):
            module._disable_adapters = disabled


def peft_config(config: LoraConfig, excluded: Sequence[str] = (), included: Sequence[str] = ()) -> "PeftLoraConfig":
    """Return peft's configuration; `included` replaces the target modules, if given."""
    from peft import LoraConfig as PeftLoraConfig

    targets = list(included) if included else list(config.target_modules)
    return PeftLoraConfig(
        r=config.rank,
        lora_alpha=config.alpha,  # pyright: ignore[reportArgumentType] - annotated int, but floats are supported
        lora_dropout=config.dropout,
        target_modules="all-linear" if targets == ["all-linear"] else targets,
        exclude_modules=list(excluded) if excluded else None,
        task_type="CAUSAL_LM",
    )


def adapted_layout(model: PreTrainedModel, layout: Layout) -> Layout:
    """Return the layout by the names that the weights have after adapters were added."""
    names = model.state_dict().keys()
    return {name: layout[_original(name)] for name in names if _original(name) in layout}


def _original(name: str) -> str:
    return name.replace(_BASE, ".")


@torch.no_grad()
def initialize_adapters(model: PreTrainedModel) -> None:
    """Initialize every A as peft does, uniform with variance 1 / (3 in), the same in any layout; every B stays zero."""
    for name, param in model.named_parameters():
        if _FACTORS[0] in name:
            generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            bound = 1 / math.sqrt(param.shape[1])
            whole = torch.empty(tuple(param.shape), dtype=torch.float32).uniform_(-bound, bound, generator=generator)
            local, start = local_box(param)
            local.copy_(whole[tuple(slice(a, a + n) for a, n in zip(start, local.shape, strict=True))])


def adapters(model: PreTrainedModel) -> dict[str, Adapter]:
    """Return the adapters by the names of their weights."""
    params: dict[str, Any] = dict(model.named_parameters())
    found = {}
    for name, a in params.items():
        if _FACTORS[0] in name:
            layer, _, _ = name.partition(_FACTORS[0])
            b = params[name.replace(*_FACTORS)]
            scaling: Any = model.get_submodule(layer).scaling
            found[f"{layer}{_BASE}weight"] = Adapter(a, b, float(scaling[_ADAPTER]))
    return found


def base_weights(model: PreTrainedModel) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the weights without those of adapters, by their names in the model."""
    return ((name, weight) for name, weight in named_weights(model) if not is_adapter(name))


def merged_weights(
    model: PreTrainedModel, readable: Callable[[torch.Tensor], torch.Tensor]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the weights with merged adapters, by their names in the model.

    Args:
        readable: returns a parameter on the device of the engine.
    """
    of_weights = adapters(model)
    for name, weight in base_weights(model):
        tensor = readable(weight)
        if name in of_weights:
            adapter = of_weights[name]
            tensor = merged(tensor, replace(adapter, a=readable(adapter.a), b=readable(adapter.b)))
        yield name, tensor


@torch.no_grad()
def merged(weight: torch.Tensor, adapter: Adapter) -> torch.Tensor:
    """Return the weight plus its adapter's update, with the placement of `weight`. Collective: all-gathers A.

    W and B are sharded along the same dimension in the same way, so this rank's rows of the update are B's times A.
    """
    a = adapter.a.full_tensor() if isinstance(adapter.a, DTensor) else adapter.a
    local, b = local_part(weight), local_part(adapter.b)
    return like(weight, local + ((b @ a.detach()) * adapter.scaling).to(local.dtype))


def adapted_modules(model: PreTrainedModel) -> list[str]:
    """Return the layers with an adapter by the names that peft matches: their last name component.

    If a layer without adapter has the same one, such as "0" in a sequence, it is the full name.
    """
    adapted = {name.removesuffix(f"{_BASE}weight") for name in adapters(model)}
    others = {_last_part(name) for name, _ in model.named_modules() if name not in adapted}
    return sorted({name if _last_part(name) in others else _last_part(name) for name in adapted})


def _last_part(name: str) -> str:
    return name.rpartition(".")[2]


def is_adapter(name: str) -> bool:
    """Return whether a parameter belongs to an adapter."""
    return any(factor in name for factor in _FACTORS)


def peft_names(model: PreTrainedModel) -> Iterator[tuple[str, str]]:
    """Yield the names of the adapters' parameters in the model and in an adapter saved by peft."""
    for name, _ in model.named_parameters():
        if is_adapter(name):
            yield name, "base_model.model." + name.replace(f".{_ADAPTER}.", ".")
