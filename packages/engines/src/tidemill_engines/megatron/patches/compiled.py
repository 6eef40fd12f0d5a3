"""Kernels compiled by torch.compile once for every number of tokens."""

from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
T = TypeVar("T")


def compile_for_any_length(function: Callable[P, T]) -> Callable[P, T]:
    """Compile a function of tensors whose first dimension is the number of tokens.

    Only this dimension is dynamic. The others are sizes of the model and constants in the kernel; with dynamic ones the
    kernel would load one value at a time. Tensors of one dimension have no token dimension. Gradients do not flow
    through the result: use it for the forward and the backward of an autograd function.
    """
    compiled: Callable[..., T] = torch.compile(function, dynamic=False)

    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        return compiled(*map(_prepare, args), **kwargs)

    return call


def _prepare(value: object) -> object:
    if not isinstance(value, torch.Tensor):
        return value
    tensor = value.detach()
    if tensor.dim() > 1:
        torch._dynamo.maybe_mark_dynamic(tensor, 0)
    return tensor
