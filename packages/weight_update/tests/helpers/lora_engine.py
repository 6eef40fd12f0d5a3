"""Weights and LoRA adapters of a small model, and a toy engine that keeps adapters as SGLang does: without a copy."""

import pickle

import torch
from engine_state import EngineState
from tidemill_weight_update import BucketHandle, LoraConfig
from tidemill_weight_update.sglang.payload import stock_payload
from torch import Tensor

HIDDEN = 8
CONFIG = LoraConfig(r=4, lora_alpha=6, target_modules=("q_proj", "o_proj"))
LAYERS = [f"layers.{i}.{part}_proj" for i in range(2) for part in "qo"]


def base(dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Weights of the layers that an adapter changes, and one other weight."""
    generator = torch.Generator().manual_seed(0)
    shapes = {f"{layer}.weight": (HIDDEN, HIDDEN) for layer in LAYERS} | {"norm.weight": (HIDDEN,)}
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}


def adapter(seed: int, dtype: torch.dtype = torch.float32) -> list[tuple[str, Tensor]]:
    """LoRA matrices, named as PEFT saves them."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {"A": (CONFIG.r, HIDDEN), "B": (HIDDEN, CONFIG.r)}
    return [
        (f"base_model.model.{layer}.lora_{matrix}.weight", torch.randn(shape, generator=generator).to(dtype))
        for layer in LAYERS
        for matrix, shape in shapes.items()
    ]


def merged(weights: dict[str, Tensor], matrices: list[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """Merge element by element: W[i, j] + alpha / r * sum over k of B[i, k] A[k, j]."""
    named = dict(matrices)
    result = dict(weights)
    for layer in LAYERS:
        a, b = (named[f"base_model.model.{layer}.lora_{matrix}.weight"] for matrix in "AB")
        result[f"{layer}.weight"] = weights[f"{layer}.weight"] + CONFIG.lora_alpha / CONFIG.r * (
            b[:, :, None] * a[None, :, :]
        ).sum(1)
    return result


class AdapterEngine(EngineState):
    """Engine of the stock path. If `refuses` is set, loads fail with this message."""

    has_loader = False

    def __init__(self, name: str = "engine") -> None:
        super().__init__(name)
        self.refuses: str | None = None
        self._adapters: dict[str, dict[str, Tensor]] = {}

    def adapters(self) -> list[str]:
        return list(self._adapters)

    def load_adapter(self, name: str, config: LoraConfig, bucket: BucketHandle) -> None:
        assert config == CONFIG
        self.calls.append(f"load {name}")
        if self.refuses is not None:
            raise RuntimeError(self.refuses)
        payload = pickle.loads(stock_payload(pickle.loads(pickle.dumps(bucket))))
        flat = payload["flattened_tensor"]
        self._adapters[name] = {
            meta.name: flat[meta.start_idx : meta.end_idx].view(meta.dtype).reshape(meta.shape)
            for meta in payload["metadata"]
        }

    def unload_adapter(self, name: str) -> None:
        self.calls.append(f"unload {name}")
        del self._adapters[name]

    def loaded(self) -> "EqualAdapters":
        return EqualAdapters(self._adapters)

    def load_bucket(self, bucket: BucketHandle) -> None:
        if self.refuses is not None:
            raise RuntimeError(self.refuses)

    def flush_cache(self) -> None:
        self.calls.append("flush")


class EqualAdapters(dict[str, dict[str, Tensor]]):
    """Adapters by name; equal if all tensors are bitwise equal."""

    __hash__ = None

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, dict)
            and list(self) == list(other)
            and all(
                list(self[name]) == list(other[name])
                and all(
                    t.dtype == other[name][n].dtype and torch.equal(t, other[name][n]) for n, t in self[name].items()
                )
                for name in self
            )
        )
