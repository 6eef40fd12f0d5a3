"""AdamW whose state exists from the start, the learning-rate schedule, and the global gradient norm."""

import math
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from tidemill_engines.config import OptimizerConfig


def learning_rate(config: OptimizerConfig, step: int) -> float:
    """The learning rate of optimizer step `step` (0 for the first): linear warm-up, then the configured decay."""
    if step < config.lr_warmup_steps:
        return config.lr * (step + 1) / config.lr_warmup_steps
    if config.lr_scheduler == "constant":
        return config.lr
    assert config.total_steps is not None
    done = min(1.0, (step - config.lr_warmup_steps) / (config.total_steps - config.lr_warmup_steps))
    left = 1.0 - done if config.lr_scheduler == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
    return config.lr * (config.min_lr_ratio + (1.0 - config.min_lr_ratio) * left)


def build_adamw(params: Iterable[torch.nn.Parameter], config: OptimizerConfig) -> torch.optim.AdamW:
    """AdamW over the trainable `params` (tensors or DTensors), with its state made at once, not by the first step.

    A checkpoint can then be saved or loaded before any step, and memory is known from the start.

    Raises:
        ValueError: no parameter is trainable.
    """
    trainable = [param for param in params if param.requires_grad]
    if not trainable:
        raise ValueError("no parameter of the model requires a gradient; create the engine with optimizer=None instead")
    optimizer = torch.optim.AdamW(
        trainable,
        lr=learning_rate(config, 0),
        betas=config.betas,
        eps=config.eps,
        weight_decay=config.weight_decay,
        fused=True,
    )
    for param in trainable:
        optimizer.state[param] = {
            "step": torch.zeros((), dtype=torch.float32, device=param.device),
            "exp_avg": torch.zeros_like(param, memory_format=torch.preserve_format),
            "exp_avg_sq": torch.zeros_like(param, memory_format=torch.preserve_format),
        }
    return optimizer


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def local_grads(params: Iterable[torch.nn.Parameter]) -> list[torch.Tensor]:
    """This rank's shards of the gradients of `params`, without those that have none."""
    return [_local(param.grad) for param in params if param.grad is not None]


def global_grad_norm(grads: Sequence[torch.Tensor], group: dist.ProcessGroup, num_replicas: int) -> float:
    """The L2 norm of a gradient whose shards lie on the ranks of `group`. Collective over `group` (gloo).

    Args:
        grads: this rank's shards.
        num_replicas: how many ranks hold the same shard.

    Returns:
        The norm, the same number on every rank; `inf` or `nan` if any element is.
    """
    total = torch.zeros((), dtype=torch.float64)
    if grads:
        dtype = torch.promote_types(grads[0].dtype, torch.float32)
        norms = torch.stack([torch.linalg.vector_norm(grad, dtype=dtype) for grad in grads])
        total = norms.double().square().sum().cpu()
    dist.all_reduce(total, group=group)
    return math.sqrt(total.item() / num_replicas)


def clip_grads(grads: Sequence[torch.Tensor], norm: float, max_norm: float) -> None:
    """Scales `grads` in place from a global norm of `norm` down to `max_norm`; smaller ones stay as they are."""
    if norm > max_norm:
        for grad in grads:
            grad.mul_(max_norm / norm)
