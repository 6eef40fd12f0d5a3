"""Traced tensors: tensors without data that remember which elements of which sources they represent.

Also the effect of a PyTorch operation on its arguments, from its schema.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from tidemill_weight_update.plan.origin import Origin, UntraceableError

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


def writes(func: Any) -> bool:
    """Return whether the operation writes to any of its arguments."""
    return bool(_written_arguments(func))


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


class ConversionError(UntraceableError):
    """The values are cast between integers and floating-point numbers."""


class Runner(Protocol):
    """Executes operations in place of the dispatcher."""

    def run(self, func: Any, args: tuple, kwargs: Mapping[str, Any]) -> Any: ...


class Traced(Tensor):
    """A tensor on the meta device whose operations are passed to its runner.

    Attributes:
        stand_in: meta tensor of the same shape; its storage offset and strides count the elements of `origin`.
        origin: origin of the elements; None if they were computed from `sources`.
        sources: names of the sources it depends on.
        rounded: dtype to which the values were rounded; None if they are those of the source.
        runner: executes its operations.
    """

    stand_in: Tensor
    origin: Origin | None
    sources: frozenset[str]
    rounded: torch.dtype | None
    runner: Runner

    __torch_function__ = torch._C._disabled_torch_function_impl  # pyright: ignore[reportAssignmentType]

    @staticmethod
    def __new__(
        cls,
        runner: Runner,
        stand_in: Tensor,
        origin: Origin | None,
        sources: frozenset[str],
        rounded: torch.dtype | None = None,
    ) -> "Traced":
        out = torch.Tensor._make_wrapper_subclass(
            cls,
            stand_in.size(),
            strides=stand_in.stride(),
            storage_offset=stand_in.storage_offset(),
            dtype=stand_in.dtype,
            device=stand_in.device,
        )
        out.runner, out.stand_in, out.origin, out.sources, out.rounded = runner, stand_in, origin, sources, rounded
        return out

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"Traced({', '.join(sorted(self.sources))}: {tuple(self.shape)}, {self.dtype})"

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = {} if kwargs is None else kwargs
        return traced_arguments(args, kwargs)[0].runner.run(func, args, kwargs)


class Watch(TorchDispatchMode):
    """Passes all operations of the current thread to the runner, including those without a traced tensor."""

    def __init__(self, runner: Runner) -> None:
        super().__init__()
        self._runner = runner

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        kwargs = {} if kwargs is None else kwargs
        if Traced not in types and not writes(func):
            return func(*args, **kwargs)  # thousands of views of parameters
        return self._runner.run(func, args, kwargs)


def traced_arguments(args: tuple, kwargs: Mapping[str, Any]) -> list[Traced]:
    """Return the traced tensors among the arguments of an operation."""
    return [leaf for leaf in leaves((*args, *kwargs.values())) if isinstance(leaf, Traced)]


def origin_of(tensor: Tensor) -> Origin:
    """Return the origin of a traced tensor.

    Raises:
        UntraceableError: the tensor does not consist of parts of sources.
    """
    if not isinstance(tensor, Traced):
        raise UntraceableError("it is combined with a tensor that is not a source")
    if tensor.origin is None:
        raise UntraceableError("it is computed")
    return tensor.origin


def view_of(tensor: Traced, func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Return the result of `func`, which returns views of its first argument.

    Raises:
        UntraceableError: the tensor does not consist of parts of sources, or the view has another dtype.
    """
    origin = origin_of(tensor)

    def wrap(inner: Tensor) -> Traced:
        if inner.dtype != tensor.dtype:
            raise UntraceableError("its bits are viewed as another dtype")
        assert inner.untyped_storage()._cdata == tensor.stand_in.untyped_storage()._cdata, f"{func} is no view"
        return Traced(tensor.runner, inner, origin, tensor.sources, tensor.rounded)

    return tree_map(wrap, func(tensor.stand_in, *args, **kwargs))


def rounding(tensor: Traced, dtype: torch.dtype) -> torch.dtype | None:
    """Return the dtype to which the values of `tensor` have been rounded after a cast to `dtype`.

    Raises:
        ConversionError: the cast is not between floating-point dtypes.
        UntraceableError: the cast rounds a second time.
    """
    if tensor.dtype == dtype:
        return tensor.rounded
    if not (tensor.dtype.is_floating_point and dtype.is_floating_point):
        raise ConversionError(f"it is cast from {tensor.dtype} to {dtype}")
    old, new = torch.finfo(tensor.dtype), torch.finfo(dtype)
    exact = new.eps <= old.eps and new.max >= old.max and new.smallest_normal * new.eps <= old.smallest_normal * old.eps
    if exact:
        return tensor.rounded
    if tensor.rounded is not None:
        raise UntraceableError(f"it is rounded to {tensor.rounded} and then to {dtype}")
    return dtype
