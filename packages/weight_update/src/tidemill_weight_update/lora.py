"""LoRA adapters: settings, PEFT's names, the two matrices of each layer, and merging into base weights."""

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from tidemill_weight_update.tensors import ShardLike, check_dense, checked_items, is_dtensor

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
        if missing := [key for key in ("r", "lora_alpha", "target_modules") if config.get(key) is None]:
            raise ValueError(f"expected the adapter setting {missing[0]!r}, got none")
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


_PREFIX = "base_model.model."
_ADAPTER = re.compile(r"(?P<module>.+)\.lora_(?P<matrix>[AB])(?:\.[^.]+)?\.weight")
"""Matches saved names, `....lora_A.weight`, and names of a live model, which contain the adapter:
`....lora_A.default.weight`.
"""


def parse(name: str, config: LoraConfig) -> tuple[str, Literal["A", "B"]]:
    """Return the linear layer of an adapter's tensor, as the model names it, and which of the two matrices it is."""
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


Pair = tuple[Tensor, Tensor]


def pairs_of(named_tensors: Iterable[tuple[str, Tensor]], config: LoraConfig) -> dict[str, Pair]:
    """Return by layer A [r, inputs] and B [outputs, r], unchanged, in the order of the layers."""
    if not isinstance(config, LoraConfig):
        raise TypeError(
            f"config must be a LoraConfig of tidemill_weight_update, got {type(config).__module__}."
            f"{type(config).__qualname__}; for PEFT's settings use LoraConfig.from_peft(peft_config.to_dict())"
        )
    found: dict[str, dict[str, Tensor]] = {}
    for name, tensor in checked_items(named_tensors):
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name!r} is a LocalShard; pass adapters as plain tensors or DTensors")
        check_dense(name, tensor)
        module, matrix = parse(name, config)
        if matrix in found.setdefault(module, {}):
            raise ValueError(f"{name!r}: matrix {matrix} of {module!r} was passed twice; pass one adapter at a time")
        if tensor.ndim != 2 or tensor.shape[0 if matrix == "A" else 1] != config.r:
            wanted = "(r, inputs)" if matrix == "A" else "(outputs, r)"
            raise ValueError(f"{name!r} must have the shape {wanted} with r={config.r}, got {tuple(tensor.shape)}")
        found[module][matrix] = tensor
    if not found:
        raise ValueError(
            "expected the tensors of an adapter, got an empty iterable; if it is a generator, create a new one"
        )
    for module, matrices in found.items():
        for matrix in ("A", "B"):
            if matrix not in matrices:
                raise ValueError(
                    f"the adapter lacks {saved_name(module, matrix)!r}, the second matrix of its layer; pass both"
                )
    return {module: (matrices["A"], matrices["B"]) for module, matrices in found.items()}


def merge_lora(
    base: Iterable[tuple[str, Tensor]], adapter: Iterable[tuple[str, Tensor]], config: LoraConfig
) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of `base`, those of the adapter's layers merged with it one at a time.

    W + scale * B @ A, computed in float32 and cast to the dtype of W (Hu et al. 2021, arXiv:2106.09685, section 4.1).
    Pass a function that returns the result to `WeightUpdater.update`, so that one merged tensor is alive at a time.
    `base` is not modified.

    Args:
        base: tensors of the model, under its own names or those of a PEFT model, whose adapter tensors are skipped: for
            example `peft_model.state_dict().items()`. DTensors keep their sharding, and the calls are collective.
        adapter: matrices A [r, inputs] and B [outputs, r], named as PEFT names them; DTensors, or plain tensors that
            are equal on all ranks.
        config: settings of the adapter.

    Raises:
        ValueError: `adapter` does not match `config` (see `pairs_of`). During iteration: a layer has another shape than
            the adapter, or is missing.
        TypeError: `config` or an item of `adapter` has a wrong type (see `pairs_of`). During iteration: an item of
            `base` has a wrong type, or a layer is a LocalShard.
    """
    return _merged(base, pairs_of(adapter, config), config.scale)


def _merged(base: Iterable[tuple[str, Tensor]], pairs: dict[str, Pair], scale: float) -> Iterator[tuple[str, Any]]:
    names: set[str] = set()
    for name, tensor in checked_items(base):
        if ".lora_" in name:  # of an adapter
            continue
        name = name.removeprefix(_PREFIX).replace(".base_layer.", ".")  # without PEFT
        names.add(name)
        pair = pairs.get(name.removesuffix(".weight")) if name.endswith(".weight") else None
        yield name, tensor if pair is None else _sum(name, tensor, pair, scale)
    lost = [module for module in pairs if f"{module}.weight" not in names]
    if lost:
        raise ValueError(
            f"the adapter changes layers that the model does not have: {', '.join(map(repr, lost[:5]))}; pass the base "
            f"model of this adapter"
        )


@torch.no_grad()
def _sum(name: str, weight: Tensor | ShardLike, pair: Pair, scale: float) -> Tensor:
    if not isinstance(weight, Tensor):
        raise TypeError(f"{name!r} is a LocalShard; pass the full tensor or a DTensor to merge_lora")
    a, b = pair
    if tuple(weight.shape) != (b.shape[0], a.shape[1]):
        raise ValueError(
            f"the adapter expects {name!r} with shape {(b.shape[0], a.shape[1])}, got {tuple(weight.shape)}"
        )
    dtype = torch.promote_types(weight.dtype, torch.float32)
    a, b = (_beside(weight, matrix, dim).to(dtype) for matrix, dim in ((a, 1), (b, 0)))
    return (weight.to(dtype) + scale * (b @ a)).to(weight.dtype)


def _beside(weight: Tensor, matrix: Tensor, dim: int) -> Tensor:
    """Return the matrix on the weight's device: split along `dim` on the mesh axes along which the weight is, else in
    full.
    """
    if not is_dtensor(weight):
        full = matrix.full_tensor() if is_dtensor(matrix) else matrix
        return full.to(weight.device)
    from torch.distributed.tensor import DTensor, Replicate, Shard

    mesh = weight.device_mesh
    placements = [Shard(dim) if placement.is_shard(dim) else Replicate() for placement in weight.placements]
    if not is_dtensor(matrix):
        local = matrix.to(mesh.device_type)
        matrix = DTensor.from_local(local, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return matrix.redistribute(mesh, placements)
