"""Megatron's optimizer under the configuration of all engines."""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
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
    """AdamW over this rank's chunks, with its state made at once. Clipping and schedule are the engine's own.

    Args:
        dtype: of the parameters; of bfloat16 ones, float32 masters are kept.
        distributed: divide the state among data-parallel ranks.

    Raises:
        ValueError: as `start_afresh`.
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
        group["fused"] = True  # one kernel for many parameters, which Megatron does not ask torch's AdamW for
    for each in torch_optimizers(optimizer):
        _fill(each)
    start_afresh(optimizer, config)
    return optimizer


def start_afresh(optimizer: MegatronOptimizer, config: OptimizerConfig) -> None:
    """Gives it other settings and sets its state to zero; parameters, and masters of them, stay as they are.

    Raises:
        ValueError: the configuration has groups of its own, whose names are those of another backend.
    """
    if config.param_groups:
        raise ValueError("OptimizerConfig.param_groups: the Megatron engine has no groups by name; leave them out")
    for group in optimizer.param_groups:
        # Megatron puts biases and weights with one dimension into a group whose decay its own scheduler, which is not
        # used, multiplies by 0.
        is_decayed = config.decay_norms_and_biases or group["wd_mult"] != 0
        group["weight_decay"] = config.weight_decay if is_decayed else 0.0
        group["betas"], group["eps"] = config.betas, config.eps
    states = [state for each in torch_optimizers(optimizer) for state in each.state.values()]
    tensors = [tensor for state in states for tensor in state.values()]
    if tensors:
        torch._foreach_zero_(tensors)  # pyright: ignore[reportPrivateImportUsage]


def torch_optimizers(optimizer: MegatronOptimizer) -> list[torch.optim.Optimizer]:
    """Those that do the work: one, or one more for the experts."""
    return [each.optimizer for each in optimizer_parts(optimizer)]


def optimizer_parts(optimizer: MegatronOptimizer) -> list[Any]:
    """Megatron's optimizers: one, or one more for the experts."""
    return getattr(optimizer, "chained_optimizers", [optimizer])


def own_tensors(optimizer: MegatronOptimizer, params: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
    """The state, and the master weights where they are not `params` themselves, the parameters of the model."""
    storages = {param.untyped_storage()._cdata for param in params}
    for each in torch_optimizers(optimizer):
        for group in each.param_groups:
            yield from (main for main in group["params"] if main.untyped_storage()._cdata not in storages)
        for state in each.state.values():
            yield from state.values()


def grad_norm(optimizer: MegatronOptimizer, device: torch.device) -> float:
    """The L2 norm of the prepared gradient over all ranks. Collective.

    Megatron's own, without Transformer Engine and Apex, asks the device for the norm of one tensor after another.
    """
    total = torch.zeros((), dtype=torch.float64, device=device)
    for part in optimizer_parts(optimizer):
        own = torch.zeros_like(total)
        grads = part.get_main_grads_for_grad_norm()
        if grads:
            own += torch.nn.utils.get_total_norm(grads).double().square()
        dist.all_reduce(own, group=part.get_grad_stats_parallel_group())
        total += own
    return math.sqrt(total.item())


def _fill(optimizer: torch.optim.Optimizer) -> None:
    """Makes the state that AdamW makes at its first step: Megatron saves and loads what is there."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            optimizer.state[parameter] = {
                "step": torch.zeros((), device=parameter.device),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }


def apply_gradient(optimizer: MegatronOptimizer, config: OptimizerConfig, norm: float, lr: float) -> None:
    """Clips the prepared gradient, whose norm is `norm`, and updates the parameters with the learning rate `lr`."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get("lr_mult", 1.0)
        grads = [parameter.grad for parameter in group["params"] if parameter.grad is not None]
        if norm > config.clip_grad and grads:
            torch._foreach_mul_(grads, config.clip_grad / norm)  # pyright: ignore[reportPrivateImportUsage]
    optimizer.step_with_ready_grads()
