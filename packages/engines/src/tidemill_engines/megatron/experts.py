"""The experts of a rank, with one kernel for each product that all of them make."""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.fusions.fused_bias_swiglu import weighted_bias_swiglu_impl
from megatron.core.transformer.moe.experts import SequentialMLP


class GroupedExperts(SequentialMLP):
    """As Megatron's experts, which go one after another and make hundreds of small kernels a layer.

    In bfloat16 they go together. Parameters, their names and their checkpoints stay those of single experts.
    """

    def forward(
        self,
        permuted_local_hidden_states: torch.Tensor,
        tokens_per_expert: torch.Tensor,
        permuted_probs: torch.Tensor,
    ) -> tuple[torch.Tensor, None]:
        """
        Args:
            permuted_local_hidden_states: [n, H], the tokens of one expert after those of another.
            tokens_per_expert: [E], on the CPU.
            permuted_probs: [n], what the result of each token is multiplied by.

        Returns:
            [n, H], and None for a bias.
        """
        hidden_states, probs = permuted_local_hidden_states, permuted_probs.unsqueeze(-1)
        if hidden_states.dtype != torch.bfloat16:
            return super().forward(hidden_states, tokens_per_expert, permuted_probs)
        counts, experts = tokens_per_expert.tolist(), list[Any](self.local_experts)
        inner = grouped_linear(hidden_states, counts, [expert.linear_fc1.weight for expert in experts])
        if self.config.bias_activation_fusion:
            inner = weighted_bias_swiglu_impl(inner, None, probs)
        else:
            gate, up = inner.chunk(2, dim=-1)
            inner = (F.silu(gate) * up * probs).to(inner.dtype)
        return grouped_linear(inner, counts, [expert.linear_fc2.weight for expert in experts]), None


def grouped_linear(x: torch.Tensor, counts: Sequence[int], weights: Sequence[torch.Tensor]) -> torch.Tensor:
    """Multiplies the first `counts[0]` rows of x by the transpose of `weights[0]`, the next by that of the next, ...

    Args:
        x: [n, K].
        weights: [N, K] each; copied together, forward and backward, which takes little beside the products.

    Returns:
        [n, N].
    """
    out = _GroupedLinear.apply(x, tuple(counts), *weights)
    assert isinstance(out, torch.Tensor)
    return out


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, x: torch.Tensor, counts: tuple[int, ...], *weights: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(x, *weights)
        ctx.counts = counts
        if not len(x):
            return x.new_empty(0, len(weights[0]))
        return F.grouped_mm(x, torch.stack(weights).mT, offs=_ends(counts, x))

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, *weights = ctx.saved_tensors
        if not len(x):
            return torch.empty_like(x), None, *map(torch.zeros_like, weights)
        ends, grad = _ends(ctx.counts, x), grad.contiguous()
        grad_x = F.grouped_mm(grad, torch.stack(weights), offs=ends)
        grad_weights = F.grouped_mm(grad.mT, x, offs=ends)
        for number, count in enumerate(ctx.counts):
            if count == 0:  # what no token reaches, a kernel may leave as it was
                grad_weights[number].zero_()
        return grad_x, None, *grad_weights.unbind()


def _ends(counts: Sequence[int], x: torch.Tensor) -> torch.Tensor:
    return torch.tensor(list(accumulate(counts)), dtype=torch.int32).to(x.device, non_blocking=True)
