"""The optimizer's state in checkpoints: tensors named after their parameters, whatever the parallel sizes."""

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_inplace
from megatron.core.dist_checkpointing.mapping import LocalNonpersistentObject, ShardedBase
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from tidemill_engines.megatron.optimizer import optimizer_parts, torch_optimizers
from tidemill_engines.megatron.patches.bucket_padding import padded_buckets


def sharded_state(
    chunks: Sequence[DistributedDataParallel],
    optimizer: MegatronOptimizer,
    models: dict[str, Any],
    metadata: dict[str, Any],
    *,
    is_loading: bool,
) -> dict[int, Any]:
    """Return the sharded tensors of each optimizer that has parameters on this rank. Collective.

    Megatron's own function for all optimizers together also puts the number of the optimizer into the names, and that
    depends on the layout: some layouts have a separate optimizer for experts. Settings are not included, because they
    come from the configuration.

    Args:
        models: sharded state of each chunk.
    """
    state: dict[int, Any] = {}
    with padded_buckets(chunks):
        for number, part in enumerate(optimizer_parts(optimizer)):
            if isinstance(part, DistributedOptimizer):
                if part.buffers:  # a pipeline stage without experts has no buffers for them
                    state[number] = part.sharded_param_state_fully_reshardable(models, is_loading, metadata)
            elif part.get_parameters():
                state[number] = part.sharded_state_dict(models, is_loading, metadata)
                dict_list_map_inplace(_keep_local, state[number])
    return state


def load(optimizer: MegatronOptimizer, state: dict[int, Any], num_steps: float) -> None:
    """Load what was saved as `sharded_state` describes it, after `num_steps` steps of Adam."""
    parts = optimizer_parts(optimizer)
    for number, values in state.items():
        if isinstance(parts[number], DistributedOptimizer):
            parts[number].load_parameter_state_from_fully_reshardable(values)
        else:
            torch_state = values.get("optimizer", values)  # with bfloat16 parameters, masters are beside it
            torch_state["state"]["common_step"] = torch.tensor(num_steps)  # not saved by Megatron before the first step
            parts[number].load_state_dict(values)
    for each in torch_optimizers(optimizer):
        for param, values in each.state.items():
            # Megatron shares one tensor among all parameters, and Adam's step would count it once per parameter.
            values["step"] = torch.tensor(num_steps, device=param.device)


def num_steps(optimizer: MegatronOptimizer) -> float:
    """Number of steps of Adam, the same for all parameters. 0 on a rank without a part of the state."""
    steps = [state["step"] for each in torch_optimizers(optimizer) for state in each.state.values()]
    return steps[0].item() if steps else 0.0


def _keep_local(value: Any) -> Any:
    return value if isinstance(value, ShardedBase | LocalNonpersistentObject) else LocalNonpersistentObject(value)
