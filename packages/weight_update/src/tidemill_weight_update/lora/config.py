"""Settings of a LoRA adapter."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_UNSUPPORTED = {
    "use_dora": False,
    "use_qalora": False,
    "use_bdlora": None,
    "alora_invocation_tokens": None,
    "arrow_config": None,
    "kasa_config": None,
    "monteclora_config": None,
    "trainable_token_indices": None,
    "rank_pattern": {},
    "alpha_pattern": {},
    "modules_to_save": [],
    "target_parameters": [],
    "layer_replication": [],
    "lora_bias": False,
    "fan_in_fan_out": False,
    "bias": "none",
}
"""PEFT settings that change the computation, and the value at which they have no effect."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LoraConfig:
    """Settings of an adapter, under PEFT's names.

    Attributes:
        r: rank of the adapter's matrices.
        lora_alpha: numerator of the scale.
        target_modules: last name parts of the linear layers that the adapter changes, such as "q_proj".
        use_rslora: whether the scale is lora_alpha / sqrt(r) (Kalajdzievski 2023, arXiv:2312.03732) instead of
            lora_alpha / r (Hu et al. 2021, arXiv:2106.09685).
    """

    r: int
    lora_alpha: float
    target_modules: tuple[str, ...]
    use_rslora: bool = False

    def __post_init__(self) -> None:
        if self.r <= 0:
            raise ValueError(f"r must be positive, got {self.r}")
        if isinstance(self.target_modules, str) or not self.target_modules:
            raise ValueError(f"target_modules must be a list of names such as 'q_proj', got {self.target_modules!r}")

    @classmethod
    def from_peft(cls, config: Mapping[str, Any]) -> "LoraConfig":
        """Create from the content of adapter_config.json, or from `model.peft_config["default"].to_dict()`.

        Raises:
            ValueError: it is not a LoRA, or it needs what SGLang does not support (DoRA, ranks by layer, biases, ...).
        """
        kind = str(getattr(config.get("peft_type"), "value", config.get("peft_type")))
        if kind.upper() != "LORA":
            raise ValueError(f"expected peft_type 'LORA', got {kind!r}")
        for key, neutral in _UNSUPPORTED.items():
            value = config.get(key)
            if value is not None and value != neutral and not (value == () and neutral == []):
                raise ValueError(f"unsupported adapter setting {key}={value!r}; only {key}={neutral!r} is supported")
        modules = config["target_modules"]
        if isinstance(modules, str):
            raise ValueError(f"target_modules must be a list of names such as 'q_proj', got {modules!r}")
        return cls(
            r=config["r"],
            lora_alpha=config["lora_alpha"],
            target_modules=tuple(sorted(modules)),
            use_rslora=bool(config.get("use_rslora")),
        )

    @property
    def scale(self) -> float:
        """Factor of the product of the adapter's matrices."""
        return self.lora_alpha / (math.sqrt(self.r) if self.use_rslora else self.r)

    def to_sglang(self) -> dict[str, Any]:
        """Return the settings as SGLang reads them from adapter_config.json. SGLang's scale is always
        lora_alpha / r.
        """
        return {
            "peft_type": "LORA",
            "r": self.r,
            "lora_alpha": self.scale * self.r if self.use_rslora else self.lora_alpha,
            "target_modules": list(self.target_modules),
            "bias": "none",
        }
