"""Megatron's optimizer with the configuration of all engines."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer, get_megatron_optimizer
from megatron.core.optimizer import OptimizerConfig as CoreConfig

from tidemill_engines.config import OptimizerConfig


def build_optimizer(
    chunks: Sequence[DistributedDataParallel],
    config: OptimizerConfig,
    *,
    dtype: torch.dtype,
    distributed: bool,
    overlap_param_gather: bool = False,
) -> MegatronOptimizer:
    """Create AdamW for this rank's chunks, with its state allocated. The engine itself clips and sets the schedule.

    Args:
        dtype: dtype of the parameters; bfloat16 parameters get float32 masters.
        distributed: shard the state over the data-parallel ranks.

    Raises:
        ValueError: see `reset_state`.
    """
    core = CoreConfig(
        optimizer="adam",
        lr=config.lr,
        min_lr=0.0,
        weight_decay=config.weight_decay,
        adam_beta1=config.betas[0],
        adam_beta2=config.betas[1],
        adam_eps=config.eps,
        clip_grad=0.0,
        bf16=dtype == torch.bfloat16,
        params_dtype=dtype,
        use_distributed_optimizer=distributed,
        overlap_param_gather=overlap_param_gather,
    )
    optimizer = get_megatron_optimizer(core, list(chunks))
    for group in optimizer.param_groups:
        group["fused"] = True  # one kernel for many parameters; Megatron does not set it for torch's AdamW
    for each in torch_optimizers(optimizer):
        _allocate_state(each)
    reset_state(optimizer, config)
    return optimizer


def reset_state(optimizer: MegatronOptimizer, config: OptimizerConfig) -> None:
    """Apply other settings and set the optimizer's state to zero. Parameters and their masters do not change.

    Raises:
        ValueError: the configuration has parameter groups, which this engine does not support.
    """
    if config.param_groups:
        raise ValueError(
            f"the Megatron engine does not support OptimizerConfig.param_groups, got {len(config.param_groups)}; "
            "leave it empty"
        )
    for group in optimizer.param_groups:
        # Megatron puts biases and one-dimensional weights into a group with wd_mult 0, which only its own scheduler
        # applies; that scheduler is not used here.
        is_decayed = config.decay_norms_and_biases or group["wd_mult"] != 0
        group["weight_decay"] = config.weight_decay if is_decayed else 0.0
        group["betas"], group["eps"] = config.betas, config.eps
    states = [state for each in torch_optimizers(optimizer) for state in each.state.values()]
    tensors = [tensor for state in states for tensor in state.values()]
    if tensors:
        torch._foreach_zero_(tensors)  # pyright: ignore[reportPrivateImportUsage]


def torch_optimizers(optimizer: MegatronOptimizer) -> list[torch.optim.Optimizer]:
    """The torch optimizers inside Megatron's: one, or two with one for the experts."""
    return [each.optimizer for each in optimizer_parts(optimizer)]


def optimizer_parts(optimizer: MegatronOptimizer) -> list[Any]:
    """Megatron's optimizers: one, or two with one for the experts."""
    return getattr(optimizer, "chained_optimizers", [optimizer])


def own_tensors(optimizer: MegatronOptimizer, params: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
    """The optimizer's state, and master weights that are not the parameters `params` of the model themselves."""
    storages = {param.untyped_storage()._cdata for param in params}
    for each in torch_optimizers(optimizer):
        for group in each.param_groups:
            yield from (main for main in group["params"] if main.untyped_storage()._cdata not in storages)
        for state in each.state.values():
            yield from state.values()


def _allocate_state(optimizer: torch.optim.Optimizer) -> None:
    """Allocate the state that AdamW allocates at its first step: Megatron saves and loads existing state only."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            optimizer.state[parameter] = {
                "step": torch.zeros((), device=parameter.device),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }


def apply_gradient(optimizer: MegatronOptimizer, config: OptimizerConfig, norm: float, lr: float) -> None:
    """Clip the prepared gradient, whose norm is `norm`, and update the parameters with learning rate `lr`."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get("lr_mult", 1.0)
        grads = [parameter.grad for parameter in group["params"] if parameter.grad is not None]
        if norm > config.clip_grad and grads:
            torch._foreach_mul_(grads, config.clip_grad / norm)  # pyright: ignore[reportPrivateImportUsage]
    optimizer.step_with_ready_grads()
