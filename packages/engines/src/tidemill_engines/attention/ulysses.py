"""Sequence parallelism of DeepSpeed-Ulysses (Jacobs et al. 2023, arXiv:2309.14509).

Each rank of a group holds a part of the tokens of the same packed rows. All layers work on that part; around attention
an all-to-all exchanges parts of the tokens for parts of the heads. Losses receive all tokens, the same on each rank of
the group. Each rank's gradient is that of its own tokens, so the gradient of the batch is the sum over all ranks.
"""

import math
from dataclasses import replace
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from tidemill_engines.model_io import ModelInputs, Outputs

OutputsT = TypeVar("OutputsT", bound=Outputs)


def tokens_to_heads(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, group: dist.ProcessGroup
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Exchange all heads of this rank's tokens for all tokens of this rank's heads. Collective over `group`.

    The heads of k and v are repeated if they cannot be divided among the ranks.

    Args:
        q: [n, H, D], k: [n, H_kv, D], v: [n, H_kv, D_v], for this rank's n of the N = n * S tokens; S divides H.

    Returns:
        q [N, H / S, D], k [N, H', D] and v [N, H', D_v], where H' divides H / S.
    """
    size = dist.get_world_size(group)
    repeats = math.lcm(k.shape[1], size) // k.shape[1]
    if repeats > 1:
        k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
    n = q.shape[0]
    parts = [x.reshape(n, size, -1) for x in (q, k, v)]  # heads of rank 0, heads of rank 1, ...
    widths = [part.shape[-1] for part in parts]
    received = _all_to_all(torch.cat(parts, -1).transpose(0, 1), group).flatten(0, 1)
    q_heads, k_heads, v_heads = received.split(widths, -1)
    return (
        q_heads.unflatten(-1, (-1, q.shape[-1])),
        k_heads.unflatten(-1, (-1, k.shape[-1])),
        v_heads.unflatten(-1, (-1, v.shape[-1])),
    )


def heads_to_tokens(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Invert the exchange: from [N, H / S, D] of this rank's heads to [n, H, D] of its tokens. Collective."""
    by_rank = x.unflatten(0, (dist.get_world_size(group), -1))
    return _all_to_all(by_rank, group).transpose(0, 1).flatten(1, 2)


def gather_output(output: OutputsT, inputs: ModelInputs, group: dist.ProcessGroup) -> OutputsT:
    """All-gather the output of all tokens from that of each rank's tokens. Collective over `group`.

    In the backward pass each rank keeps the gradient of its own tokens; every rank of the group has the same loss.
    """
    whole = {
        name: gather_parts(
            value, slice(inputs.first_output, inputs.first_output + len(value)), inputs.num_outputs, group
        )
        for name, value in output.columns().items()
    }
    return replace(output, **whole)


def gather_parts(own: torch.Tensor, places: slice | torch.Tensor, total: int, group: dist.ProcessGroup) -> torch.Tensor:
    """All-gather `total` rows; this rank has the rows at `places`. Collective over `group`.

    In the backward pass each rank keeps the gradient of its own rows.
    """
    out = _Gather.apply(own, places, total, group)
    assert isinstance(out, torch.Tensor)
    return out


@torch.compiler.disable()  # torch 2.11 compiles it with wrong gradients
def _all_to_all(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    out = _AllToAll.apply(x, group)
    assert isinstance(out, torch.Tensor)
    return out


class _AllToAll(torch.autograd.Function):
    """Send x[i] to rank i and receive out[i] from it. The operation is its own transpose."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.group = group
        return _exchange(x, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return _exchange(grad, ctx.group), None


def _exchange(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    x = x.contiguous()
    out = torch.empty_like(x)
    dist.all_to_all_single(out, x, group=group)
    return out


class _Gather(torch.autograd.Function):
    """All-gather the rows of all ranks; in the backward pass, select this rank's rows."""

    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, own: torch.Tensor, places: slice | torch.Tensor, total: int, group: dist.ProcessGroup
    ) -> torch.Tensor:
        ctx.places = places
        whole = own.new_zeros(total, *own.shape[1:])
        whole[places] = own
        dist.all_reduce(whole, group=group)  # exact, as it adds zeros; parts may differ in length
        return whole

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return grad[ctx.places], None, None, None
