"""Rotary position embedding of packed rows as one kernel.

Upstream does:
    `apply_rotary_pos_emb` copies the lengths of the rows to the CPU and concatenates the angles of each row, for q and
    k of every layer (`rope_utils.py`, `_apply_rotary_pos_emb_thd`); then it runs several elementwise kernels. Its fused
    kernels need Transformer Engine.

Problem:
    Slow: two synchronizations with the device per layer. Here the angles are computed once for each micro-batch
    (`tidemill_engines.megatron.rotary`), and one compiled kernel applies them.

Seen in:
    megatron-core 0.16.1

Remove when:
    Megatron applies angles given by position, without copying lengths to the CPU, and without Transformer Engine.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from tidemill_engines.megatron.patches.compiled import compile_for_any_length


def apply_rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, fused: bool = False) -> torch.Tensor:
    """Rotate dimension i together with dimension i + D / 2, as Llama and Qwen do.

    Args:
        x: [n, H, D].
        cos, sin: [n, 1, D / 2], in the dtype of x; see `Rotary.cos_sin`.
        fused: use one kernel compiled by torch.compile.
    """
    out = _Rotation.apply(x, cos, sin, fused)
    assert isinstance(out, torch.Tensor)
    return out


class _Rotation(torch.autograd.Function):
    """Saves only the angles; the gradient is rotated by the opposite angles."""

    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, fused: bool
    ) -> torch.Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.rotate = _compiled() if fused else _rotate
        return ctx.rotate(x, cos, sin)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        cos, sin = ctx.saved_tensors
        return ctx.rotate(grad, cos, -sin), None, None, None


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    halves = x.unflatten(-1, (2, -1))
    signs = torch.arange(-1, 2, 2, device=x.device, dtype=x.dtype).unsqueeze(-1)
    return (halves * cos.unsqueeze(-2) + halves.flip(-2) * sin.unsqueeze(-2) * signs).flatten(-2)


@cache
def _compiled() -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]:
    return compile_for_any_length(_rotate)
