"""AdamW with an initial state, the learning-rate schedule, and the global gradient norm."""

import math
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from tidemill_engines.config import OptimizerConfig

INCOMPLETE_GRADIENTS = (
    "a backward has failed, so the gradients are those of a part of its batch; call optimizer_zero_grad() and run the "
    "batches of this step again"
)
"""Error of a step after a failed backward."""


def learning_rate(config: OptimizerConfig, step: int) -> float:
    """Return the learning rate of optimizer step `step` (0 for the first): linear warm-up, then the schedule."""
    if step < config.lr_warmup_steps:
        return config.lr * (step + 1) / config.lr_warmup_steps
    if config.lr_scheduler == "constant":
        return config.lr
    assert config.total_steps is not None
    start = config.lr_warmup_steps
    if config.lr_scheduler == "wsd":
        assert config.lr_decay_steps is not None
        start = config.total_steps - config.lr_decay_steps
    done = min(1.0, max(0.0, (step - start) / (config.total_steps - start)))
    left = 0.5 * (1.0 + math.cos(math.pi * done)) if config.lr_scheduler == "cosine" else 1.0 - done
    return config.lr * (config.min_lr_ratio + (1.0 - config.min_lr_ratio) * left)


class _ShardAdamW(torch.optim.AdamW):
    """AdamW that updates this rank's shards of DTensors as plain tensors, with the same results.

    torch 2.11 does not free its description of the arguments (a DTensorSpec for each parameter) after a fused step on
    DTensors, so the memory of a rank would grow with every step.
    """

    def _init_group(
        self,
        group: dict[str, Any],
        params_with_grad: list[torch.Tensor],
        grads: list[torch.Tensor],
        exp_avgs: list[torch.Tensor],
        exp_avg_sqs: list[torch.Tensor],
        max_exp_avg_sqs: list[torch.Tensor],
        state_steps: list[torch.Tensor],
    ) -> bool:
        lists = params_with_grad, grads, exp_avgs, exp_avg_sqs, max_exp_avg_sqs, state_steps
        has_complex = super()._init_group(group, *lists)
        for tensors in lists:
            tensors[:] = map(_local, tensors)
        return has_complex


def build_adamw(named_params: Iterable[tuple[str, torch.nn.Parameter]], config: OptimizerConfig) -> torch.optim.AdamW:
    """Create AdamW for the trainable parameters (tensors or DTensors), with its state allocated.

    So a checkpoint can be saved or loaded before the first step, and the memory use is constant.

    Raises:
        ValueError: no parameter is trainable, or a pattern of `config.param_groups` matches no trainable parameter.
    """
    trainable = [(name, param) for name, param in named_params if param.requires_grad]
    if not trainable:
        raise ValueError("no parameter of the model is trainable; correct ModelConfig.frozen, or pass optimizer=None")
    groups = group_params(trainable, config)
    optimizer = _ShardAdamW(
        groups, lr=learning_rate(config, 0), betas=config.betas, eps=config.eps, weight_decay=0.0, fused=True
    )
    for _, param in trainable:
        optimizer.state[param] = {
            "step": torch.zeros((), dtype=torch.float32, device=param.device),
            "exp_avg": torch.zeros_like(param, memory_format=torch.preserve_format),
            "exp_avg_sq": torch.zeros_like(param, memory_format=torch.preserve_format),
        }
    set_learning_rate(optimizer, learning_rate(config, 0))
    return optimizer


def group_params(
    named_params: Sequence[tuple[str, torch.nn.Parameter]], config: OptimizerConfig
) -> list[dict[str, Any]]:
    """Group parameters with equal settings, in the format of torch's optimizers, with the additional key `lr_ratio`.

    Raises:
        ValueError: a pattern of `config.param_groups` matches no parameter.
    """
    groups: dict[tuple[float, float], list[torch.nn.Parameter]] = {}
    unused = {group.pattern for group in config.param_groups}
    for name, param in named_params:
        own = next((group for group in config.param_groups if fnmatchcase(name, group.pattern)), None)
        exempt = not config.decay_norms_and_biases and (param.dim() < 2 or name.rpartition(".")[2] == "bias")
        decay, ratio = 0.0 if exempt else config.weight_decay, 1.0
        if own is not None:
            unused.discard(own.pattern)
            ratio = own.lr_ratio
            decay = decay if own.weight_decay is None else own.weight_decay
        groups.setdefault((ratio, decay), []).append(param)
    if unused:
        names = ", ".join(name for name, _ in named_params[:3])
        raise ValueError(
            f"OptimizerConfig.param_groups: {', '.join(sorted(unused))} matches no trainable parameter that no earlier "
            f"pattern matches; remove or correct the pattern. Names are, for example, {names}"
        )
    return [{"params": params, "lr_ratio": ratio, "weight_decay": decay} for (ratio, decay), params in groups.items()]


def set_learning_rate(optimizer: torch.optim.AdamW, lr: float) -> None:
    """Set the learning rate of every group of an optimizer of `build_adamw`."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group["lr_ratio"]


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def local_grads(params: Iterable[torch.nn.Parameter]) -> list[torch.Tensor]:
    """Return this rank's shards of the gradients of `params`; parameters without gradient are skipped."""
    return [_local(param.grad) for param in params if param.grad is not None]


def global_grad_norm(grads: Sequence[torch.Tensor], group: dist.ProcessGroup, num_replicas: int) -> float:
    """Compute the L2 norm of a gradient that is sharded over the ranks of `group`. Collective over `group` (gloo).

    Args:
        grads: this rank's shards.
        num_replicas: number of ranks that hold the same shard.

    Returns:
        The norm, the same on every rank; `inf` or `nan` if any element is.
    """
    total = torch.zeros((), dtype=torch.float64)
    if grads:
        dtype = torch.promote_types(grads[0].dtype, torch.float32)
        norms = torch.stack([torch.linalg.vector_norm(grad, dtype=dtype) for grad in grads])
        total = norms.double().square().sum().cpu()
    dist.all_reduce(total, group=group)
    return math.sqrt(total.item() / num_replicas)


def clip_grads(grads: Sequence[torch.Tensor], norm: float, max_norm: float) -> None:
    """Scale `grads`, with the global norm `norm`, in place to a norm of at most `max_norm`."""
    if norm > max_norm:
        for grad in grads:
            grad.mul_(max_norm / norm)


def nonfinite_params(named_params: Iterable[tuple[str, torch.nn.Parameter]]) -> list[str]:
    """Return the names of the parameters whose gradient has a non-finite element on this rank."""
    return [
        name for name, param in named_params if param.grad is not None and not torch.isfinite(_local(param.grad)).all()
    ]
