"""The optimizer's state in checkpoints: tensors named after their parameters, however Megatron divides the work."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_inplace
from megatron.core.dist_checkpointing.mapping import LocalNonpersistentObject, ShardedBase
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from tidemill_engines.megatron.optimizer import optimizer_parts, torch_optimizers


def sharded_state(
    chunks: Sequence[DistributedDataParallel],
    optimizer: MegatronOptimizer,
    models: dict[str, Any],
    metadata: dict[str, Any],
    *,
    is_loading: bool,
) -> dict[int, Any]:
    """For each part of the optimizer that has parameters here, its tensors with their places. Collective.

    Megatron's own for all parts together names tensors after the part, too, and there are as many parts as the layout
    asks for: experts have one of their own in some. Settings are not in it, which are the configuration's.

    Args:
        models: the sharded state of each chunk.
    """
    state: dict[int, Any] = {}
    with _as_parameters_lie(chunks):
        for number, part in enumerate(optimizer_parts(optimizer)):
            if isinstance(part, DistributedOptimizer):
                if part.buffers:  # a pipeline stage without experts has none for theirs
                    state[number] = part.sharded_param_state_fully_reshardable(models, is_loading, metadata)
            elif part.get_parameters():
                state[number] = part.sharded_state_dict(models, is_loading, metadata)
                dict_list_map_inplace(_of_this_rank, state[number])
    return state


def load(optimizer: MegatronOptimizer, state: dict[int, Any], num_steps: float) -> None:
    """Takes over what was loaded as `sharded_state` describes it, `num_steps` of Adam after its start."""
    parts = optimizer_parts(optimizer)
    for number, values in state.items():
        if isinstance(parts[number], DistributedOptimizer):
            parts[number].load_parameter_state_from_fully_reshardable(values)
        else:
            of_torch = values.get("optimizer", values)  # there are masters beside it, where they are needed
            of_torch["state"]["common_step"] = torch.tensor(num_steps)  # Megatron leaves it out before the first step
            parts[number].load_state_dict(values)
    for each in torch_optimizers(optimizer):
        for param, values in each.state.items():
            values["step"] = torch.tensor(num_steps, device=param.device)


def num_steps(optimizer: MegatronOptimizer) -> float:
    """How many steps Adam has made: the same for all parameters. 0 on a rank that has no part of the state."""
    steps = [state["step"] for each in torch_optimizers(optimizer) for state in each.state.values()]
    return steps[0].item() if steps else 0.0


def _of_this_rank(value: Any) -> Any:
    return value if isinstance(value, ShardedBase | LocalNonpersistentObject) else LocalNonpersistentObject(value)


@contextmanager
def _as_parameters_lie(chunks: Sequence[DistributedDataParallel]) -> Iterator[None]:
    """Lets Megatron gather the state of a buffer with the padding between its buckets.

    It leaves that out, but then looks for each parameter where it lies with it, and so mixes up the parameters behind
    the first bucket whose length is not a multiple of the padding (`distrib_optimizer.py:1109` and 1500).
    """
    kept: list[tuple[Any, int]] = []
    for chunk in chunks:
        buffers: Any = chunk.buffers  # a list, unlike that of other modules
        for buffer in [*buffers, *chunk.expert_parallel_buffers]:
            kept += [(each, each.numel_unpadded) for each in (buffer, *buffer.buckets)]
    try:
        for each, _ in kept:
            each.numel_unpadded = each.grad_data.numel()
        yield
    finally:
        for each, numel in kept:
            each.numel_unpadded = numel
