"""Initialize weights by the model's own rule, for training from scratch."""

import zlib
from collections.abc import Iterable, Iterator

import torch
from transformers import PreTrainedModel

from tidemill_engines.fsdp2.weights import compute_buffers, local_box


@torch.no_grad()
def draw_weights(model: PreTrainedModel, seed: int, device: torch.device, *, zero: Iterable[str] = ()) -> None:
    """Initialize every weight of a sharded model as transformers does, on `device`, the same in any layout.

    Each rank initializes one full module at a time and keeps its part, so it never holds more than one full module.

    Args:
        zero: names of parameters that start at zero instead.

    Raises:
        ValueError: the model class does not initialize a parameter.
    """
    names = {id(param): name for name, param in model.named_parameters()}
    done = {id(param) for name, param in model.named_parameters() if name in set(zero)}
    for param in model.parameters():
        if id(param) in done:
            local_box(param)[0].zero_()
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        for owner, module in _modules(model, model):
            own = {key: param for key, param in module._parameters.items() if param is not None}
            if not own or all(id(param) in done for param in own.values()):
                continue  # tied weights are initialized once
            torch.manual_seed(zlib.crc32(f"{seed} {names[id(next(iter(own.values())))]}".encode()))
            for key, whole in _drawn(owner, module, device).items():
                if id(own[key]) not in done:
                    if whole.isnan().any():
                        raise ValueError(
                            f"{type(owner).__name__}._init_weights does not initialize {names[id(own[key])]}; load a "
                            "checkpoint, with ModelConfig.init_seed=None"
                        )
                    local, start = local_box(own[key])
                    local.copy_(whole[tuple(slice(a, a + n) for a, n in zip(start, local.shape, strict=True))])
                    done.add(id(own[key]))
    compute_buffers(model)


def _modules(owner: PreTrainedModel, module: torch.nn.Module) -> Iterator[tuple[PreTrainedModel, torch.nn.Module]]:
    """Yield `module` and all modules in it, each with the innermost model that contains it and initializes it."""
    for child in module.children():
        yield from _modules(child if isinstance(child, PreTrainedModel) else owner, child)
    yield owner, module


def _drawn(owner: PreTrainedModel, module: torch.nn.Module, device: torch.device) -> dict[str, torch.Tensor]:
    """Return the full, newly initialized parameters of `module` itself; those that are not initialized are NaN."""
    sharded = module._parameters
    whole = {
        key: torch.nn.Parameter(torch.full(param.shape, torch.nan, dtype=param.dtype, device=device))
        for key, param in sharded.items()
        if param is not None
    }
    module._parameters = {**sharded, **whole}
    try:
        owner._init_weights(module)
    finally:
        module._parameters = sharded
    return {key: param.data for key, param in whole.items()}
