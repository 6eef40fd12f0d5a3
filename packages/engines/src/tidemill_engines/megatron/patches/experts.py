"""All experts of a rank in one kernel per matrix product.

Upstream does:
    Without Transformer Engine, `SequentialMLP` runs one expert after another (`experts.py:820`). `GroupedMLP` requires
    the extension `grouped_gemm`, and changes the names of parameters.

Problem:
    Slow: hundreds of small kernels per layer, and one autograd node and gradient hook for each matrix of each expert in
    every micro-batch. torch's `grouped_mm` multiplies all experts in one kernel. The parameters, their names and their
    checkpoints stay those of `SequentialMLP`.

Seen in:
    megatron-core 0.16.1

Remove when:
    Megatron has grouped experts that need torch only, or the engine requires Transformer Engine for MoE.
"""

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from typing import Any, Self

import torch
import torch.nn.functional as F
from megatron.core.fusions.fused_bias_swiglu import weighted_bias_swiglu_impl
from megatron.core.transformer.moe.experts import SequentialMLP

from tidemill_engines.distributed.device import to_device


class GroupedExperts(SequentialMLP):
    """Megatron's experts, multiplied together in bfloat16.

    Attributes:
        accumulates_gradients: the backward adds the gradients of all experts to Megatron's buffers, instead of leaving
            each to autograd.
        on_gradient_ready: called with each parameter when its gradient is complete; set it before the first forward.
    """

    accumulates_gradients = False
    on_gradient_ready: "Callable[[torch.nn.Parameter], None] | None" = None
    _weights: "tuple[ExpertWeights, ExpertWeights] | None" = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.local_experts = _ReversedNames(self.local_experts)

    def train(self, mode: bool = True) -> Self:
        """Set the mode of this module only: experts compute the same in both modes, and there are thousands."""
        self.training = mode
        return self

    def forward(
        self,
        permuted_local_hidden_states: torch.Tensor,
        tokens_per_expert: torch.Tensor,
        permuted_probs: torch.Tensor,
    ) -> tuple[torch.Tensor, None]:
        """
        Args:
            permuted_local_hidden_states: [n, H], sorted by expert.
            tokens_per_expert: [E], on the CPU.
            permuted_probs: [n], factors of the outputs.

        Returns:
            [n, H], and None for a bias.
        """
        hidden_states, probs = permuted_local_hidden_states, permuted_probs.unsqueeze(-1)
        if hidden_states.dtype != torch.bfloat16:
            return super().forward(hidden_states, tokens_per_expert, permuted_probs)
        if self._weights is None:
            experts = list[Any](self.local_experts)
            first, second = ([getattr(each, name).weight for each in experts] for name in ("linear_fc1", "linear_fc2"))
            self._weights = (
                ExpertWeights(first, self.on_gradient_ready),
                ExpertWeights(second, self.on_gradient_ready),
            )
        first, second = self._weights
        rows = ExpertRows.from_counts(tokens_per_expert.tolist(), hidden_states.device)
        is_fused = self.config.bias_activation_fusion
        add = None
        if self.accumulates_gradients and torch.is_grad_enabled():
            add = _compiled_add() if is_fused else _add
        inner = grouped_linear(hidden_states, rows, first, add)
        if is_fused:
            inner = weighted_bias_swiglu_impl(inner, None, probs)
        else:
            gate, up = inner.chunk(2, dim=-1)
            inner = (F.silu(gate) * up * probs).to(inner.dtype)
        return grouped_linear(inner, rows, second, add), None


class _ReversedNames(torch.nn.ModuleList):
    """A list that enumerates its modules, and so their parameters, from last to first.

    Megatron's buffers hold parameters in reverse order. The matrices of the experts are then in order and at equal
    distances in memory, as if they were one tensor.
    """

    def named_modules(
        self, memo: set[torch.nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Generator[tuple[str, torch.nn.Module], None, None]:
        memo = set() if memo is None else memo
        if self in memo:
            return
        if remove_duplicate:
            memo.add(self)
        yield prefix, self
        for name, module in reversed(self._modules.items()):
            assert module is not None
            yield from module.named_modules(memo, f"{prefix}.{name}" if prefix else name, remove_duplicate)


class ExpertWeights:
    """One matrix of each expert, all of one shape. Views of them are cached, because every micro-batch needs them.

    Args:
        parameters: the matrices.
        on_gradient_ready: see `GroupedExperts`.

    Attributes:
        parameters: the matrices.
        anchor: the only parameter that autograd sees where gradients are accumulated in place. Megatron's hooks run for
            each parameter that autograd sees.
    """

    def __init__(
        self,
        parameters: Sequence[torch.nn.Parameter],
        on_gradient_ready: Callable[[torch.nn.Parameter], None] | None = None,
    ) -> None:
        self.parameters = tuple(parameters)
        self.anchor = self.parameters[0].new_empty(0).requires_grad_()
        self._on_gradient_ready = on_gradient_ready
        self._values, self._gradients = _ViewCache(), _ViewCache()

    def stacked(self) -> torch.Tensor:
        """[E, N, K]: a view if the matrices are at equal distances in memory, otherwise a copy."""
        view = self._values.get(self.parameters)
        return torch.stack(self.parameters) if view is None else view

    def add_gradients(self, add: "Add", values: torch.Tensor | None) -> None:
        """Add `values` [E, N, K], if any, to the `main_grad` of all experts, in one kernel if memory allows it."""
        if values is not None:
            buffers = [parameter.main_grad for parameter in self.parameters]  # type: ignore[attr-defined] - Megatron's
            view = self._gradients.get(buffers)
            for target, value in zip(buffers, values, strict=True) if view is None else [(view, values)]:
                add(target, value)
        if self._on_gradient_ready is not None:
            for parameter in self.parameters:
                self._on_gradient_ready(parameter)


class _ViewCache:
    """Result of `as_stacked_view` for some tensors, until one of them moves in memory."""

    def __init__(self) -> None:
        self._addresses: list[int] = []
        self._view: torch.Tensor | None = None

    def get(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor | None:
        addresses = [tensor.data_ptr() for tensor in tensors]
        if addresses != self._addresses:
            self._addresses, self._view = addresses, as_stacked_view(tensors)
        return self._view


Add = Callable[[torch.Tensor, torch.Tensor], object]
"""Adds the second tensor to the first, in place."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ExpertRows:
    """Rows of each of E experts, sorted by expert.

    Attributes:
        ends: [E] int32, on the device.
        idle: int64, on the device: experts without rows; None if every expert has some.
    """

    ends: torch.Tensor
    idle: torch.Tensor | None

    @classmethod
    def from_counts(cls, counts: Sequence[int], device: torch.device) -> "ExpertRows":
        idle = [expert for expert, count in enumerate(counts) if count == 0]
        ends = to_device(torch.tensor(list(accumulate(counts)), dtype=torch.int32), device)
        return cls(ends=ends, idle=to_device(torch.tensor(idle), device) if idle else None)


def grouped_linear(x: torch.Tensor, rows: ExpertRows, weights: ExpertWeights, add: Add | None = None) -> torch.Tensor:
    """Multiply the rows of each expert by the transpose of its matrix.

    Args:
        x: [n, K].
        weights: one matrix [N, K] per expert; copied into one tensor, in forward and backward, unless they are at equal
            distances in memory.
        add: adds their gradients in place to their `main_grad`, without autograd. None leaves the gradients to
            autograd.

    Returns:
        [n, N].
    """
    inputs = weights.parameters if add is None else (weights.anchor,)
    out = _GroupedLinear.apply(x, rows, weights, add, *inputs)
    assert isinstance(out, torch.Tensor)
    return out


def as_stacked_view(tensors: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """Return a view [E, ...] of tensors of one shape at equal distances in one storage, or None if they are not."""
    first, shape = tensors[0], tensors[0].shape
    addresses = [tensor.data_ptr() for tensor in tensors]
    step, rest = divmod(addresses[1] - addresses[0] if len(addresses) > 1 else 0, first.element_size())
    end = first.storage_offset() + step * (len(tensors) - 1) + first.numel()
    are_regular = addresses == [addresses[0] + number * step * first.element_size() for number in range(len(addresses))]
    if rest or step < 0 or not are_regular or end > first.untyped_storage().nbytes() // first.element_size():
        return None
    if not all(tensor.is_contiguous() and tensor.shape == shape for tensor in tensors):
        return None
    return first.detach().as_strided((len(tensors), *shape), (step, *first.stride()))


def _add(target: torch.Tensor, value: torch.Tensor) -> None:
    target.add_(value)


@cache
def _compiled_add() -> Callable[[torch.Tensor, torch.Tensor], None]:
    return torch.compile(_add, dynamic=False)


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, x: torch.Tensor, rows: ExpertRows, weights: ExpertWeights, add: Add | None, *inputs: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.rows, ctx.weights, ctx.add = rows, weights, add
        if not len(x):
            return x.new_empty(0, len(weights.parameters[0]))
        return F.grouped_mm(x, weights.stacked().mT, offs=rows.ends)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (x,), weights, rows = ctx.saved_tensors, ctx.weights, ctx.rows
        if not len(x):
            grad_x, grad_weights = torch.empty_like(x), None
        else:
            grad = grad.contiguous()
            grad_x = F.grouped_mm(grad, weights.stacked(), offs=rows.ends)
            grad_weights = F.grouped_mm(grad.mT, x, offs=rows.ends)
            if rows.idle is not None:  # the kernel may leave the memory of experts without rows uninitialized
                grad_weights.index_fill_(0, rows.idle, 0.0)
        if ctx.add is not None:
            weights.add_gradients(ctx.add, grad_weights)
            return grad_x, None, None, None, None
        if grad_weights is None:
            return grad_x, None, None, None, *[torch.zeros_like(each) for each in weights.parameters]
        return grad_x, None, None, None, *grad_weights.unbind()
