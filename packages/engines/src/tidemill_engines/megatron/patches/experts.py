"""The experts of a rank, with one kernel for each product that all of them make."""

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from typing import Any, Self

import torch
import torch.nn.functional as F
from megatron.core.fusions.fused_bias_swiglu import weighted_bias_swiglu_impl
from megatron.core.transformer.moe.experts import SequentialMLP


class GroupedExperts(SequentialMLP):
    """As Megatron's experts, which go one after another and make hundreds of small kernels a layer.

    In bfloat16 they go together. Parameters, their names and their checkpoints stay those of single experts.

    Attributes:
        adds_gradients: whether the backward adds the gradients of all experts to Megatron's buffers itself, instead of
            leaving them to autograd, one by one.
        tell_ready: called with each parameter when its gradient has been added; set it before the first forward.
    """

    adds_gradients = False
    tell_ready: "Callable[[torch.Tensor], None] | None" = None
    _matrices: "tuple[Matrices, Matrices] | None" = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.local_experts = _FromLast(self.local_experts)

    def train(self, mode: bool = True) -> Self:
        """Tells no module below: experts do the same in training and evaluation, and they are thousands."""
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
            permuted_local_hidden_states: [n, H], the tokens of one expert after those of another.
            tokens_per_expert: [E], on the CPU.
            permuted_probs: [n], what the result of each token is multiplied by.

        Returns:
            [n, H], and None for a bias.
        """
        hidden_states, probs = permuted_local_hidden_states, permuted_probs.unsqueeze(-1)
        if hidden_states.dtype != torch.bfloat16:
            return super().forward(hidden_states, tokens_per_expert, permuted_probs)
        if self._matrices is None:
            experts = list[Any](self.local_experts)
            first, second = ([getattr(each, name).weight for each in experts] for name in ("linear_fc1", "linear_fc2"))
            self._matrices = Matrices(first, self.tell_ready), Matrices(second, self.tell_ready)
        first, second = self._matrices
        rows, is_fused = Rows.of(tokens_per_expert.tolist(), hidden_states.device), self.config.bias_activation_fusion
        add = None
        if self.adds_gradients and torch.is_grad_enabled():
            add = _compiled_add() if is_fused else _add
        inner = grouped_linear(hidden_states, rows, first, add)
        if is_fused:
            inner = weighted_bias_swiglu_impl(inner, None, probs)
        else:
            gate, up = inner.chunk(2, dim=-1)
            inner = (F.silu(gate) * up * probs).to(inner.dtype)
        return grouped_linear(inner, rows, second, add), None


class _FromLast(torch.nn.ModuleList):
    """Names its modules, and with them parameters, from the last to the first.

    Megatron's buffers hold parameters in the opposite order, so there the matrices of one expert after the other lie at
    equal distances, as if they were one tensor.
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


class Matrices:
    """One matrix of each of several experts, all of one shape.

    They are asked for in each layer of each micro-batch, so what was found out about them is kept.

    Args:
        each: the parameters.
        tell_ready: see `GroupedExperts`.

    Attributes:
        each: the parameters.
        anchor: stands for all of them in autograd's graph where it need not know them: for each that it knows, it calls
            Megatron's hook.
    """

    def __init__(self, each: Sequence[torch.Tensor], tell_ready: Callable[[torch.Tensor], None] | None = None) -> None:
        self.each = tuple(each)
        self.anchor = self.each[0].new_empty(0).requires_grad_()
        self._tell_ready = tell_ready
        self._values, self._gradients = _Space(), _Space()

    def stacked(self) -> torch.Tensor:
        """[E, N, K]: a view where they lie at equal distances, else a copy."""
        one = self._values.of(self.each)
        return torch.stack(self.each) if one is None else one

    def add_gradients(self, add: "Add", values: torch.Tensor | None) -> None:
        """Adds `values` [E, N, K], if any, to their `main_grad`, all at once where these lie at equal distances."""
        if values is not None:
            buffers = [parameter.main_grad for parameter in self.each]  # type: ignore[attr-defined] - Megatron's
            one = self._gradients.of(buffers)
            for target, value in zip(buffers, values, strict=True) if one is None else [(one, values)]:
                add(target, value)
        for parameter in self.each if self._tell_ready is not None else ():
            self._tell_ready(parameter)


class _Space:
    """What `as_one` says of some tensors, for as long as they lie where they lay."""

    def __init__(self) -> None:
        self._places: list[int] = []
        self._one: torch.Tensor | None = None

    def of(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor | None:
        places = [tensor.data_ptr() for tensor in tensors]
        if places != self._places:
            self._places, self._one = places, as_one(tensors)
        return self._one


Add = Callable[[torch.Tensor, torch.Tensor], object]
"""Adds the second tensor to the first, in place."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Rows:
    """Which rows belong to which of E experts, those of one after those of another.

    Attributes:
        ends: [E] int32, on the device.
        idle: int64, on the device: experts that have none; None where each has some.
    """

    ends: torch.Tensor
    idle: torch.Tensor | None

    @classmethod
    def of(cls, counts: Sequence[int], device: torch.device) -> "Rows":
        idle = [expert for expert, count in enumerate(counts) if count == 0]
        ends = torch.tensor(list(accumulate(counts)), dtype=torch.int32).to(device, non_blocking=True)
        return cls(ends=ends, idle=torch.tensor(idle).to(device, non_blocking=True) if idle else None)


def grouped_linear(x: torch.Tensor, rows: Rows, matrices: Matrices, add: Add | None = None) -> torch.Tensor:
    """Multiplies the rows of each expert by the transpose of its matrix.

    Args:
        x: [n, K].
        matrices: [N, K] each; copied together, forward and backward, unless they lie at equal distances.
        add: adds their gradients in place to their `main_grad`, and autograd is not told of them. None leaves the
            gradients to autograd.

    Returns:
        [n, N].
    """
    told = matrices.each if add is None else (matrices.anchor,)
    out = _GroupedLinear.apply(x, rows, matrices, add, *told)
    assert isinstance(out, torch.Tensor)
    return out


def as_one(tensors: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """A view [E, ...] of tensors of one shape that lie at equal distances in one storage; None if they do not."""
    first, shape = tensors[0], tensors[0].shape
    places = [tensor.data_ptr() for tensor in tensors]
    step, rest = divmod(places[1] - places[0] if len(places) > 1 else 0, first.element_size())
    end = first.storage_offset() + step * (len(tensors) - 1) + first.numel()
    are_regular = places == [places[0] + number * step * first.element_size() for number in range(len(places))]
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
        ctx: Any, x: torch.Tensor, rows: Rows, matrices: Matrices, add: Add | None, *told: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.rows, ctx.matrices, ctx.add = rows, matrices, add
        if not len(x):
            return x.new_empty(0, len(matrices.each[0]))
        return F.grouped_mm(x, matrices.stacked().mT, offs=rows.ends)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (x,), matrices, rows = ctx.saved_tensors, ctx.matrices, ctx.rows
        if not len(x):
            grad_x, grad_weights = torch.empty_like(x), None
        else:
            grad = grad.contiguous()
            grad_x = F.grouped_mm(grad, matrices.stacked(), offs=rows.ends)
            grad_weights = F.grouped_mm(grad.mT, x, offs=rows.ends)
            if rows.idle is not None:  # what no token reaches, a kernel may leave as it was
                grad_weights.index_fill_(0, rows.idle, 0.0)
        if ctx.add is not None:
            matrices.add_gradients(ctx.add, grad_weights)
            return grad_x, None, None, None, None
        told = [torch.zeros_like(each) for each in matrices.each] if grad_weights is None else grad_weights.unbind()
        return grad_x, None, None, None, *told
