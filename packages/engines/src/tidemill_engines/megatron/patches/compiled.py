"""Kernels that torch.compile makes for any number of tokens."""

from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
T = TypeVar("T")


def for_any_length(function: Callable[P, T]) -> Callable[P, T]:
    """Compiles a function of tensors whose first dimension is the number of tokens, once for all numbers.

    Other sizes are those of a model, and numbers in the kernel: with unknown ones it would read value after value.
    Tensors of one dimension have no tokens. No gradients pass: it is for both directions of an autograd function.
    """
    compiled: Callable[..., T] = torch.compile(function, dynamic=False)

    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        return compiled(*map(_prepared, args), **kwargs)

    return call


def _prepared(value: object) -> object:
    if not isinstance(value, torch.Tensor):
        return value
    tensor = value.detach()
    if tensor.dim() > 1:
        torch._dynamo.maybe_mark_dynamic(tensor, 0)
    return tensor
