"""The effect of a PyTorch dispatcher operation on its arguments, from its schema."""

from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor

_aten = torch.ops.aten


def leaves(values: Iterable[Any]) -> Iterator[Any]:
    """Yield the arguments of an operation, including those in lists; operations accept no deeper nesting."""
    for value in values:
        if isinstance(value, list | tuple):
            yield from value
        else:
            yield value


@cache
def is_view(func: Any) -> bool:
    """Return whether the operation returns views of its arguments."""
    if func is _aten._unsafe_view.default:
        return True
    aliases = [argument.alias_info for argument in func._schema.arguments]
    return any(alias is not None and not alias.is_write for alias in aliases)


@cache
def _written_arguments(func: Any) -> tuple[tuple[int, str], ...]:
    arguments = enumerate(func._schema.arguments)
    return tuple((i, arg.name) for i, arg in arguments if arg.alias_info is not None and arg.alias_info.is_write)


def written(func: Any, args: tuple, kwargs: Mapping[str, Any]) -> list[Tensor]:
    """Return the tensors that an operation writes to."""
    values = [args[i] if i < len(args) else kwargs.get(name) for i, name in _written_arguments(func)]
    return [leaf for leaf in leaves(values) if isinstance(leaf, Tensor)]


def returned(func: Any, tensors: list[Tensor]) -> Any:
    """Return the result of an operation that writes to `tensors`: the tensors, or nothing."""
    count = len(func._schema.returns)
    return None if count == 0 else tensors[0] if count == 1 else tuple(tensors)


def constant(func: Any, args: tuple) -> float | None:
    """Return the value that an operation writes to every element; None if it does something else."""
    if func is _aten.zero_.default:
        return 0.0
    if func is _aten.fill_.Scalar:
        return float(args[1])
    if func is _aten.fill_.Tensor and not args[1].is_meta:
        return float(args[1].item())
    return None
