"""L2 norm of the gradient with one synchronization.

Upstream does:
    `MegatronOptimizer.get_grad_norm` calls a kernel of Transformer Engine or Apex, and without them computes the norm
    of one tensor after another and copies each to the CPU (`utils.py`, `local_multi_tensor_l2_norm`).

Problem:
    Slow without Transformer Engine and Apex: one synchronization with the device for each parameter.

Seen in:
    megatron-core 0.16.1

Remove when:
    The fallback uses `torch.nn.utils.get_total_norm` or `torch._foreach_norm`.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist


def grad_norm(optimizers: Sequence[Any], device: torch.device) -> float:
    """Return the L2 norm of the prepared gradient over all ranks. Collective.

    Args:
        optimizers: Megatron's optimizers, one for each kind of parameters.
        device: device of the gradients.
    """
    total = torch.zeros((), dtype=torch.float64, device=device)
    for optimizer in optimizers:
        own = torch.zeros_like(total)
        grads = optimizer.get_main_grads_for_grad_norm()
        if grads:
            own += torch.nn.utils.get_total_norm(grads).double().square()
        dist.all_reduce(own, group=optimizer.get_grad_stats_parallel_group())
        total += own
    return math.sqrt(total.item())
