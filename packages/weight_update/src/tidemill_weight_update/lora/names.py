"""PEFT's names of tensors."""

import re
from typing import Literal

from tidemill_weight_update.lora.config import LoraConfig

_PREFIX = "base_model.model."
_ADAPTER = re.compile(r"(?P<module>.+)\.lora_(?P<matrix>[AB])(?:\.[^.]+)?\.weight")
"""As saved, `....lora_A.weight`, and as in a live model, with the adapter's name: `....lora_A.default.weight`."""


def is_of_adapter(name: str) -> bool:
    """Whether a tensor of a PEFT model belongs to an adapter, not to the model below."""
    return ".lora_" in name


def base_name(name: str) -> str:
    """The name that a tensor of the model has without PEFT around it."""
    return name.removeprefix(_PREFIX).replace(".base_layer.", ".")


def parse(name: str, config: LoraConfig) -> tuple[str, Literal["A", "B"]]:
    """The linear layer that a tensor of an adapter belongs to, as the model names it, and which of the two it is.

    Raises:
        ValueError: no name of a matrix of a linear layer's adapter, or `config` does not name the layer.
    """
    found = _ADAPTER.fullmatch(name)
    if found is None:
        raise ValueError(f"expected the name of a LoRA matrix as '....q_proj.lora_A.weight', got {name!r}")
    module = found["module"].removeprefix(_PREFIX)
    if module.rsplit(".", 1)[-1] not in config.target_modules:
        raise ValueError(f"{name!r} belongs to no module of target_modules={list(config.target_modules)}")
    return module, "A" if found["matrix"] == "A" else "B"


def saved_name(module: str, matrix: Literal["A", "B"]) -> str:
    """The name in an adapter's file."""
    return f"{_PREFIX}{module}.lora_{matrix}.weight"
