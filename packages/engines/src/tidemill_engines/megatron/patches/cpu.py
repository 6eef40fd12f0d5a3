"""What megatron-core 0.16 needs to run on a CPU: redirections of what it takes from torch, in its own modules only.

Nothing happens at import. `on_cpu()` is a context; while at least one is open, every `megatron.core` module sees a
stand-in under its name `torch`, and what follows holds. Other modules see torch as it is, but for the two methods of
Tensor. Upstream places are those of megatron-core 0.16.1.

- `torch.cuda.current_device` is the CPU: tensors are made there (`tensor_parallel/mappings.py`, `layers.py`, ...).
- `device="cuda"` means the CPU and `pin_memory` nothing, where they are written out (`schedules.py:596`,
  `optimizer.py:473`, `clip_grads.py:90`, `moe_utils.py:998`).
- Streams and events do nothing: there is one stream (`token_dispatcher.py`, `shared_experts.py`).
- `synchronize` and `empty_cache` do nothing (`p2p_communication.py`, `parallel_state.py`).
- The random state is that of the CPU (`tensor_parallel/random.py:47` to 110).
- `Tensor.cuda()` is the tensor itself, for all modules: it could only raise (`language_module.py:244`, tied embeddings;
  `dist_checkpointing/exchange_utils.py:336`).
- `Tensor.type()` says `torch.cuda.` to callers in `megatron.core.optimizer`, which compare dtypes by that name
  (`optimizer.py:671`, `distrib_optimizer.py:361`, `clip_grads.py:167`).
- `maybe_move_tensor_to_cpu` converts to numpy, which it does for CUDA tensors only (`moe_utils.py:1093`).
"""

import importlib
import sys
import types
from collections.abc import Callable
from typing import Any

import torch

from tidemill_engines.megatron.patches.monkeypatch import Changes, Redirection

_CPU = torch.device("cpu")
# Modules that others import only when they are needed; they have to be there to be redirected.
_NEEDED = (
    *("tensor_parallel.random", "transformer.moe.moe_utils", "transformer.moe.moe_layer", "models.gpt"),
    *("transformer.moe.token_dispatcher", "models.gpt.gpt_layer_specs", "distributed", "pipeline_parallel.schedules"),
    *("optimizer", "optimizer.distrib_optimizer", "dist_checkpointing.serialization"),
    *("dist_checkpointing.strategies.torch", "dist_checkpointing.strategies.fully_parallel"),
    "dist_checkpointing.exchange_utils",
)


def _redirect(changes: Changes) -> None:
    for name in _NEEDED:
        importlib.import_module(f"megatron.core.{name}")
    stand_in = _torch()
    for name, module in list(sys.modules.items()):
        if name.startswith("megatron.core") and getattr(module, "torch", None) is torch:
            changes.set(module, "torch", stand_in)
    changes.set(torch.Tensor, "cuda", lambda tensor, *args, **kwargs: tensor)
    changes.set(torch.Tensor, "type", _type_for_optimizers(torch.Tensor.type))
    random = sys.modules["megatron.core.tensor_parallel.random"]
    changes.set(random, "_get_cuda_rng_state", lambda *args, **kwargs: torch.get_rng_state())
    changes.set(random, "_set_cuda_rng_state", lambda state, *args, **kwargs: torch.set_rng_state(state))
    dispatcher = sys.modules["megatron.core.transformer.moe.token_dispatcher"]
    changes.set(dispatcher, "maybe_move_tensor_to_cpu", _as_numpy)


class _Idle:
    """A stream or an event, as a context too: nothing happens, and whatever is asked of it is itself."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        pass

    def __enter__(self) -> "_Idle":
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def __getattr__(self, name: str) -> Callable[..., "_Idle"]:
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
        empty_cache=lambda: None,
        Stream=_Idle,
        Event=_Idle,
        stream=_Idle,
        current_stream=_Idle,
        default_stream=_Idle,
        manual_seed=torch.manual_seed,
        get_rng_state=lambda *args, **kwargs: torch.get_rng_state(),
        set_rng_state=lambda state, *args, **kwargs: torch.set_rng_state(state),
    )
    factories = ("zeros", "ones", "empty", "full", "tensor", "empty_like")
    return _StandIn(torch, cuda=cuda, **{name: _on_cpu(getattr(torch, name)) for name in factories})


def _on_cpu(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def made(*args: Any, **kwargs: Any) -> torch.Tensor:
        device = kwargs.get("device")
        if isinstance(device, str | torch.device) and torch.device(device).type == "cuda":
            kwargs["device"] = _CPU
        if "pin_memory" in kwargs:
            kwargs["pin_memory"] = False
        return make(*args, **kwargs)

    return made


def _type_for_optimizers(real: Callable[..., Any]) -> Callable[..., Any]:
    def type_(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        said = real(tensor, *args, **kwargs)
        caller = sys._getframe(1).f_globals.get("__name__", "")
        if isinstance(said, str) and caller.startswith("megatron.core.optimizer"):
            return said.replace("torch.", "torch.cuda.", 1)
        return said

    return type_


def _as_numpy(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor


on_cpu = Redirection(_redirect)
"""Lets megatron-core run on the CPU while a context of it is open. ImportError if megatron-core is not installed."""
