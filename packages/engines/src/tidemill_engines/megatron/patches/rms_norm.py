"""Root mean square norms of packed rows, whose number changes from micro-batch to micro-batch."""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from tidemill_engines.megatron.patches.compiled import for_any_length


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Divides x by the root of its mean square over the last dimension, in float32, and multiplies it by `weight`.

    As `torch.nn.functional.rms_norm`, with few kernels made by torch.compile: torch's own adds up the gradient of a
    weight of 128 numbers with four blocks of threads, which takes longer than all the rest.

    Args:
        x: [n, ..., D]; kernels are made for all sizes of n at once.
        weight: [D].
    """
    out = _Normed.apply(x, weight, eps, True)
    assert isinstance(out, torch.Tensor)
    return out


class _Normed(torch.autograd.Function):
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
    normed, of_normed = x.float() * scale, grad.float() * weight.float()
    grad_x = scale * (of_normed - normed * (of_normed * normed).mean(-1, keepdim=True))
    grad_weight = (grad.float() * normed).flatten(0, -2).sum(0)
    return grad_x.to(x.dtype), grad_weight.to(weight.dtype)


@cache
def _compiled() -> tuple[Callable[..., Any], Callable[..., Any]]:
    return for_any_length(_forward), for_any_length(_gradients)
