"""Megatron on a CPU: what megatron-core takes from torch.cuda is replaced, in its own modules only.

While the context `on_cpu()` is open, every `megatron.core` module has a stand-in under its name `torch`. Other modules
see torch unchanged, except for two methods of Tensor. Importing this module changes nothing.

Upstream does:
    1. Create tensors on `torch.cuda.current_device()` (`tensor_parallel/mappings.py`, `layers.py`, ...).
    2. Write `device="cuda"` and `pin_memory=True` literally (`schedules.py:596`, `optimizer.py:473`,
       `rope_utils.py:63`).
    3. Use CUDA streams (`token_dispatcher.py`, `shared_experts.py`).
    4. Call `synchronize` (`p2p_communication.py`, `parallel_state.py`).
    5. Save and restore the random state of the GPU (`tensor_parallel/random.py:47` to 110).
    6. Call `Tensor.cuda()` (`language_module.py:244`, tied embeddings; `dist_checkpointing/exchange_utils.py:336`).
    7. Compare dtypes by the name that `Tensor.type()` returns, which starts with `torch.cuda.` on a GPU
       (`optimizer.py:671`, `distrib_optimizer.py:361`, `clip_grads.py:167`).
    8. Convert to numpy in `maybe_move_tensor_to_cpu` for CUDA tensors only (`moe_utils.py:1093`).

Problem:
    Each of these raises on a machine without a GPU, so the engine could not be tested there.

Seen in:
    megatron-core 0.16.1; places are those of this version.

Remove when:
    megatron-core runs on a CPU with gloo. A single item can go when its place uses the device of its tensors.
"""

import importlib
import sys
import types
from collections.abc import Callable
from typing import Any

import torch

from tidemill_engines.megatron.patches.monkeypatch import Attributes, Monkeypatch

_CPU = torch.device("cpu")
# Modules that megatron-core imports lazily; they must be imported before they can be patched.
_MODULES = (
    "tensor_parallel.random",
    "transformer.moe.moe_utils",
    "transformer.moe.moe_layer",
    "models.gpt",
    "transformer.moe.token_dispatcher",
    "models.gpt.gpt_layer_specs",
    "distributed",
    "pipeline_parallel.schedules",
    "optimizer",
    "optimizer.distrib_optimizer",
    "dist_checkpointing.serialization",
    "dist_checkpointing.strategies.torch",
    "dist_checkpointing.strategies.fully_parallel",
    "dist_checkpointing.exchange_utils",
)


def _apply(attributes: Attributes) -> None:
    for name in _MODULES:
        importlib.import_module(f"megatron.core.{name}")
    stand_in = _torch()
    for name, module in list(sys.modules.items()):
        if name.startswith("megatron.core") and getattr(module, "torch", None) is torch:
            attributes.replace(module, "torch", stand_in)
    attributes.replace(torch.Tensor, "cuda", lambda tensor, *args, **kwargs: tensor)
    attributes.replace(torch.Tensor, "type", _type_for_optimizers(torch.Tensor.type))
    random = sys.modules["megatron.core.tensor_parallel.random"]
    attributes.replace(random, "_get_cuda_rng_state", lambda *args, **kwargs: torch.get_rng_state())
    attributes.replace(random, "_set_cuda_rng_state", lambda state, *args, **kwargs: torch.set_rng_state(state))
    dispatcher = sys.modules["megatron.core.transformer.moe.token_dispatcher"]
    attributes.replace(dispatcher, "maybe_move_tensor_to_cpu", _as_numpy)


class _NoStream:
    """A stream that does nothing, also as a context; every method returns the object itself."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        pass

    def __enter__(self) -> "_NoStream":
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def __getattr__(self, name: str) -> Callable[..., "_NoStream"]:
        return lambda *args, **kwargs: self


class _StandIn(types.ModuleType):
    """A module with some of its attributes replaced."""

    def __init__(self, real: types.ModuleType, **replaced: object) -> None:
        super().__init__(real.__name__)
        self.__dict__.update(replaced, _real=real)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_real"], name)


def _torch() -> types.ModuleType:
    cuda = _StandIn(
        torch.cuda,
        current_device=lambda: _CPU,
        synchronize=lambda *args, **kwargs: None,
        Stream=_NoStream,
        stream=_NoStream,
        current_stream=_NoStream,
        manual_seed=torch.manual_seed,
        get_rng_state=lambda *args, **kwargs: torch.get_rng_state(),
        set_rng_state=lambda state, *args, **kwargs: torch.set_rng_state(state),
    )
    return _StandIn(torch, cuda=cuda, zeros=_on_cpu(torch.zeros), tensor=_on_cpu(torch.tensor))


def _on_cpu(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def create(*args: Any, **kwargs: Any) -> torch.Tensor:
        device = kwargs.get("device")
        if isinstance(device, str | torch.device) and torch.device(device).type == "cuda":
            kwargs["device"] = _CPU
        if "pin_memory" in kwargs:
            kwargs["pin_memory"] = False
        return factory(*args, **kwargs)

    return create


def _type_for_optimizers(real: Callable[..., Any]) -> Callable[..., Any]:
    def type_(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        result = real(tensor, *args, **kwargs)
        caller = sys._getframe(1).f_globals.get("__name__", "")
        if isinstance(result, str) and caller.startswith("megatron.core.optimizer"):
            return result.replace("torch.", "torch.cuda.", 1)
        return result

    return type_


def _as_numpy(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor


on_cpu = Monkeypatch(_apply)
"""Context in which megatron-core runs on the CPU. Raises ImportError if megatron-core is not installed."""
