"""Rotary position embeddings of packed rows, whose positions begin anew with each row."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from transformers import PretrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from tidemill_engines.megatron.patches.compiled import for_any_length

FIXED_TYPES = ("default", "linear", "llama3", "yarn")
"""The rope types of transformers whose angles are the same however long a row is."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rotary:
    """Which angles queries and keys are turned by.

    Attributes:
        frequencies: [D / 2], float32, the angles from one position to the next of the pairs of a head's dimensions.
        scaling: of cosines and sines; yarn's attention factor.
    """

    frequencies: tuple[float, ...]
    scaling: float = 1.0

    @classmethod
    def of(cls, config: PretrainedConfig, head_dim: int) -> "Rotary":
        """As transformers computes it for one of the `FIXED_TYPES`."""
        rope = config.rope_parameters
        scaling = 1.0
        if rope["rope_type"] == "default":
            frequencies = 1.0 / rope["rope_theta"] ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
        else:
            frequencies, scaling = ROPE_INIT_FUNCTIONS[rope["rope_type"]](config)
        return cls(frequencies=tuple(frequencies.tolist()), scaling=scaling)

    def at(self, position_ids: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosine and sine [n, 1, D / 2] of the angles at positions [1, n], computed in float32."""
        frequencies = torch.tensor(self.frequencies, dtype=torch.float32).to(position_ids.device, non_blocking=True)
        angles = position_ids.view(-1, 1, 1).float() * frequencies
        return (angles.cos() * self.scaling).to(dtype), (angles.sin() * self.scaling).to(dtype)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, fused: bool = False) -> torch.Tensor:
    """Turns dimension i together with i + D / 2, as Llama and Qwen do.

    Args:
        x: [n, H, D].
        cos, sin: [n, 1, D / 2] of `Rotary.at`, in the dtype of x.
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
