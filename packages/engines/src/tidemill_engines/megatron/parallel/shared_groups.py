"""Megatron's own process groups, which it keeps in module globals.

The engines of a process share them: the first one creates them, the last one destroys them.
"""

from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel

from tidemill_engines.megatron.config import MegatronConfig

_SIZES = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "virtual_pipeline_model_parallel_size",
    "context_parallel_size",
    "expert_model_parallel_size",
)


@dataclass(slots=True)
class _Made:
    """The layout of Megatron's groups in this process, and the number of engines that use them."""

    layout: dict[str, object] = field(default_factory=dict)
    num_engines: int = 0


_made = _Made()


def check_layout(config: MegatronConfig, device: torch.device) -> None:
    """Check that an engine can create Megatron's groups or share those of the other engines. No communication.

    Raises:
        RuntimeError: the other engines have another layout, or other code has created Megatron's groups.
    """
    if not _made.num_engines:
        if parallel_state.model_parallel_is_initialized():
            raise RuntimeError(
                "expected no groups of Megatron in this process, but other code has created some; call megatron.core's "
                "parallel_state.destroy_model_parallel() first, or use another process"
            )
        return
    different = [
        f"{name} = {value} instead of {_made.layout[name]}"
        for name, value in _layout(config, device).items()
        if value != _made.layout[name]
    ]
    if different:
        raise RuntimeError(
            "Megatron keeps its groups once per process, so the Megatron engines of a process must have the same "
            f"layout; this one has {', '.join(different)}. Use the layout of the others, close() them first, or use "
            "another process"
        )


def join_megatron_groups(config: MegatronConfig, device: torch.device, *, seed: int, timeout: timedelta) -> None:
    """Create Megatron's groups, if absent. Collective over all ranks.

    Args:
        seed: seed of Megatron's random states, which differ between ranks; ignored if the groups exist.
        timeout: timeout of the groups; ignored if they exist.
    """
    if not _made.num_engines:
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=config.tensor_model_parallel_size,
            pipeline_model_parallel_size=config.pipeline_model_parallel_size,
            virtual_pipeline_model_parallel_size=config.virtual_pipeline_model_parallel_size,
            context_parallel_size=config.context_parallel_size,
            expert_model_parallel_size=config.expert_model_parallel_size,
            expert_tensor_parallel_size=config.expert_tensor_parallel_size,
            distributed_timeout_minutes=timeout.total_seconds() / 60,  # type: ignore[arg-type] - a timedelta accepts it
        )
        # Only once: it resets the random states of the process, which the other engines use, too.
        tensor_parallel.model_parallel_cuda_manual_seed(seed)
        _made.layout = _layout(config, device)
    _made.num_engines += 1


def leave_megatron_groups() -> None:
    """Destroy Megatron's groups if no other engine uses them."""
    _made.num_engines -= 1
    if _made.num_engines:
        return
    for group in parallel_state._global_process_group_list or []:
        if group is not None:  # Megatron only drops its references, which leaves the groups' threads running
            dist.destroy_process_group(group)
    parallel_state.destroy_model_parallel()


def _layout(config: MegatronConfig, device: torch.device) -> dict[str, object]:
    """Return what engines of a process have in common: sizes, and the device, because `patches.cpu` is for all."""
    sizes = {name: getattr(config, name) for name in _SIZES}
    return {**sizes, "expert_tensor_parallel_size": config.expert_tp, "device": device.type}
