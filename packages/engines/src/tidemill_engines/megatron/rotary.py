"""Rotary position embeddings of packed rows, whose positions begin anew with each row."""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from tidemill_engines.megatron.compiled import for_any_length


def rotary_angles(position_ids: torch.Tensor, head_dim: int, theta: float) -> torch.Tensor:
    """The angles [n, 1, D / 2] in float32 that the pairs of a head's dimensions are turned by at positions [1, n]."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device=position_ids.device) / head_dim
    return position_ids.view(-1, 1, 1).float() * (1.0 / theta**exponents)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, fused: bool = False) -> torch.Tensor:
    """Turns dimension i together with i + D / 2, as Llama and Qwen do.

    Args:
        x: [n, H, D].
        cos, sin: of the angles [n, 1, D / 2], in the dtype of x.
        fused: as one kernel, by torch.compile.
    """
    out = _Rotation.apply(x, cos, sin, fused)
    assert isinstance(out, torch.Tensor)
    return out


class _Rotation(torch.autograd.Function):
    """Keeps the angles only: the gradient is turned back by them."""

    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, fused: bool
    ) -> torch.Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.turn = _compiled() if fused else _turned
        return ctx.turn(x, cos, sin)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        cos, sin = ctx.saved_tensors
        return ctx.turn(grad, cos, -sin), None, None, None


def _turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    halves = x.unflatten(-1, (2, -1))
    signs = torch.arange(-1, 2, 2, device=x.device, dtype=x.dtype).unsqueeze(-1)
    return (halves * cos.unsqueeze(-2) + halves.flip(-2) * sin.unsqueeze(-2) * signs).flatten(-2)


@cache
def _compiled() -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]:
    return for_any_length(_turned)
