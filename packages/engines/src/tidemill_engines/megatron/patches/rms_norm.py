"""RMS norm for sequence parallelism, with compiled kernels.

Upstream does:
    1. Without Transformer Engine and Apex, `WrappedTorchNorm` refuses sequence parallelism (`torch_norm.py:34`).
    2. It is `torch.nn.RMSNorm`.

Problem:
    1. Sequence parallelism is an AssertionError. It needs the weight marked `sequence_parallel`: each rank has the
       gradient of its own tokens only, and Megatron sums the gradients of marked weights.
    2. Slow: torch reduces the gradient of a weight of 128 elements (norms of q and k) with four blocks of threads,
       which takes longer than all other kernels of the norm.

Seen in:
    megatron-core 0.16.1, torch 2.11.0

Remove when:
    1. `WrappedTorchNorm` marks its weight.
    2. `torch.nn.RMSNorm` is as fast for narrow weights.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from megatron.core.transformer import TransformerConfig

from tidemill_engines.megatron.patches.compiled import compile_for_any_length


class RMSNorm(torch.nn.RMSNorm):
    """Megatron's RMS norm, also with sequence parallelism."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: object) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self._is_fused = config.bias_activation_fusion
        if config.sequence_parallel:
            self.weight.sequence_parallel = True  # type: ignore[assignment]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self._is_fused:
            return super().forward(x)
        assert self.eps is not None
        return rms_norm(x, self.weight, self.eps)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Divide x by its root mean square over the last dimension, in float32, and multiply it by `weight`.

    Same result as `torch.nn.functional.rms_norm`, with few compiled kernels.

    Args:
        x: [n, ..., D]; the kernels serve every n.
        weight: [D].
    """
    out = _RMSNorm.apply(x, weight, eps, True)
    assert isinstance(out, torch.Tensor)
    return out


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float, compiled: bool
    ) -> torch.Tensor:
        forward, ctx.gradients = _compiled() if compiled else (_forward, _gradients)
        out, scale = forward(x, weight, eps)
        ctx.save_for_backward(x, weight, scale)
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, weight, scale = ctx.saved_tensors
        return *ctx.gradients(grad, x, weight, scale), None, None


def _forward(x: torch.Tensor, weight: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    scale = (x.float().square().mean(-1, keepdim=True) + eps).rsqrt()
    return (x.float() * scale * weight.float()).to(x.dtype), scale


def _gradients(
    grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    normed, grad_normed = x.float() * scale, grad.float() * weight.float()
    grad_x = scale * (grad_normed - normed * (grad_normed * normed).mean(-1, keepdim=True))
    grad_weight = (grad.float() * normed).flatten(0, -2).sum(0)
    return grad_x.to(x.dtype), grad_weight.to(weight.dtype)


@cache
def _compiled() -> tuple[Callable[..., Any], Callable[..., Any]]:
    return compile_for_any_length(_forward), compile_for_any_length(_gradients)
