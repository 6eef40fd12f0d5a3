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
- `te_general_gemm` is None: without Transformer Engine the name is undefined, so every router fails
  (`moe_utils.py:1192`).
- `maybe_move_tensor_to_cpu` converts to numpy, which it does for CUDA tensors only (`moe_utils.py:1093`).
- Adam's `step` is left alone where parameter and moments are set: torch's AdamW keeps it with them, and looking it up
  fails (`distrib_optimizer.py:938`).
"""

import importlib
import sys
import threading
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

_CPU = torch.device("cpu")
# Modules that others import only when they are needed; they have to be there to be redirected.
_NEEDED = (
    *("tensor_parallel.random", "transformer.moe.moe_utils", "transformer.moe.moe_layer", "models.gpt"),
    *("transformer.moe.token_dispatcher", "models.gpt.gpt_layer_specs", "distributed", "pipeline_parallel.schedules"),
    *("optimizer", "optimizer.distrib_optimizer", "dist_checkpointing.serialization"),
    *("dist_checkpointing.strategies.torch", "dist_checkpointing.strategies.fully_parallel"),
    "dist_checkpointing.exchange_utils",
)
_lock = threading.Lock()
_open: list["_Redirections"] = []
"""The redirections that hold in this process, once for each context: modules are of the process, so this is, too."""


@contextmanager
def on_cpu() -> Iterator[None]:
    """Lets megatron-core run on the CPU while the context is open; contexts may overlap.

    Raises:
        ImportError: megatron-core is not installed.
    """
    with _lock:
        _open.append(_open[0] if _open else _Redirections())
    try:
        yield
    finally:
        with _lock:
            redirections = _open.pop()
            if not _open:
                redirections.undo()


class _Redirections:
    """Replaces attributes and remembers what was there."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []
        for name in _NEEDED:
            importlib.import_module(f"megatron.core.{name}")
        stand_in = _torch()
        for name, module in list(sys.modules.items()):
            if name.startswith("megatron.core") and getattr(module, "torch", None) is torch:
                self._set(module, "torch", stand_in)
        self._set(torch.Tensor, "cuda", lambda tensor, *args, **kwargs: tensor)
        self._set(torch.Tensor, "type", _type_for_optimizers(torch.Tensor.type))
        self._set_random_state(sys.modules["megatron.core.tensor_parallel.random"])
        self._set_experts()
        optimizer = sys.modules["megatron.core.optimizer.distrib_optimizer"].DistributedOptimizer
        name = "_set_main_param_and_optimizer_states"
        self._set(optimizer, name, _without_step(getattr(optimizer, name)))

    def undo(self) -> None:
        while self._undo:
            self._undo.pop()()

    def _set(self, owner: Any, name: str, value: object) -> None:
        if name in vars(owner):
            before = vars(owner)[name]
            self._undo.append(lambda: setattr(owner, name, before))
        else:
            self._undo.append(lambda: delattr(owner, name))
        setattr(owner, name, value)

    def _set_random_state(self, module: types.ModuleType) -> None:
        self._set(module, "_get_cuda_rng_state", lambda *args, **kwargs: torch.get_rng_state())
        self._set(module, "_set_cuda_rng_state", lambda state, *args, **kwargs: torch.set_rng_state(state))

    def _set_experts(self) -> None:
        moe_utils = sys.modules["megatron.core.transformer.moe.moe_utils"]
        if "te_general_gemm" not in vars(moe_utils):
            self._set(moe_utils, "te_general_gemm", None)
        dispatcher = sys.modules["megatron.core.transformer.moe.token_dispatcher"]
        self._set(dispatcher, "maybe_move_tensor_to_cpu", _as_numpy)


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


def _without_step(real: Callable[..., None]) -> Callable[..., None]:
    def set_states(self: Any, model_param: torch.Tensor, tensors: dict[str, torch.Tensor]) -> None:
        group, order = self.model_param_group_index_map[model_param]
        main_param = self.optimizer.param_groups[group]["params"][order]
        state = self.optimizer.state[main_param]
        if "step" not in state:
            real(self, model_param, tensors)
            return
        with torch.no_grad():
            for name, target in {"param": main_param, **state}.items():
                if name != "step":
                    target.copy_(tensors[name])

    return set_states
