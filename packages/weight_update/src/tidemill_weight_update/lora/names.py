"""PEFT's tensor names."""

import re
from typing import Literal

from tidemill_weight_update.lora.config import LoraConfig

_PREFIX = "base_model.model."
_ADAPTER = re.compile(r"(?P<module>.+)\.lora_(?P<matrix>[AB])(?:\.[^.]+)?\.weight")
"""Matches saved names, `....lora_A.weight`, and names of a live model, which contain the adapter:
`....lora_A.default.weight`.
"""


def is_of_adapter(name: str) -> bool:
    """Return whether a tensor of a PEFT model belongs to an adapter instead of the base model."""
    return ".lora_" in name


def base_name(name: str) -> str:
    """Return the tensor's name in the model without PEFT."""
    return name.removeprefix(_PREFIX).replace(".base_layer.", ".")


def parse(name: str, config: LoraConfig) -> tuple[str, Literal["A", "B"]]:
    """Return the linear layer of an adapter's tensor, as the model names it, and which of the two matrices it is.

    Raises:
        ValueError: it is not the name of an adapter matrix of a linear layer, or `config` does not list the layer.
    """
    found = _ADAPTER.fullmatch(name)
    if found is None:
        raise ValueError(f"expected the name of a LoRA matrix such as '....q_proj.lora_A.weight', got {name!r}")
    module = found["module"].removeprefix(_PREFIX)
    if module.rsplit(".", 1)[-1] not in config.target_modules:
        raise ValueError(f"{name!r} belongs to no module in target_modules={list(config.target_modules)}")
    return module, "A" if found["matrix"] == "A" else "B"


def saved_name(module: str, matrix: Literal["A", "B"]) -> str:
    """Return the name in an adapter file."""
    return f"{_PREFIX}{module}.lora_{matrix}.weight"
