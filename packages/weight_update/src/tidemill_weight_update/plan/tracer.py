"""The tracer: follows the sources through a model's loading code to the parameters.

Sources are tensors on the meta device. Views of them share their storage, so a tensor's storage says which sources it
holds, and its offset and strides say which elements: torch computes all views itself.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from tidemill_weight_update.copy.table import Copy
from tidemill_weight_update.plan.origin import Origin, Part, UntraceableError, pieces, trace, whole
from tidemill_weight_update.plan.plan import Fill
from tidemill_weight_update.tensors import Box, SourceSpec

_aten = torch.ops.aten
_USE_STOCK_PATH = "launch this engine without the tidemill loader, so that it is updated on the stock path"


class ConversionError(UntraceableError):
    """The values are cast between integers and floating-point numbers."""


@dataclass(frozen=True, slots=True)
class Write:
    """A write of loading to elements `offset + sum(i_d * strides[d])` of `parameter`, for all `i` below `shape`.

    Attributes:
        names: sources of the values; empty for a fill, and for values that depend on no source.
        during: source that loading had requested last; None before the first and after the last one.
        replay: how to repeat it; None if that requires `load_weights`.
    """

    parameter: str
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    names: tuple[str, ...]
    during: str | None
    replay: Copy | Fill | None


@dataclass(slots=True, eq=False)
class _Values:
    """What a storage without data stands for.

    Attributes:
        tensor: tensor that keeps the storage.
        origin: origin of the elements, whose parts count `names`; None if they were computed.
        rounded: dtype to which the values were rounded; None if they are those of the source.
    """

    tensor: Tensor
    names: tuple[str, ...]
    origin: Origin | None
    dtype: torch.dtype
    rounded: torch.dtype | None = None


class Tracer(TorchDispatchMode):
    """Records the writes to the parameters instead of executing them, while it is entered, in the thread that entered.

    Attributes:
        sizes: number of elements of each parameter; the first name of several for the same memory.
        writes: writes in their order.
        untraceable: source -> reason, for sources that were used in other ways than copies.
        converted: sources among them that were cast between integers and floating-point numbers.
        groups: sets of names that an operation combined.
        current: source that loading requested last; None before the first and after the last one.
    """

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.sizes: dict[str, int] = {}
        self.writes: list[Write] = []
        self.untraceable: dict[str, str] = {}
        self.converted: set[str] = set()
        self.groups: set[frozenset[str]] = set()
        self.current: str | None = None
        self._parameters = parameters
        self._values: dict[int, _Values] = {}
        self._of_storage: dict[int, list[tuple[int, int, str]]] = {}  # first element, end, name
        self._read: tuple[str, ...] = ()
        places: set[tuple[object, ...]] = set()
        for name, parameter in parameters.items():
            storage, start = _storage(parameter), int(parameter.storage_offset())
            place = storage, start, parameter.shape, parameter.stride()
            if place not in places:  # otherwise it is an alias
                places.add(place)
                self._of_storage.setdefault(storage, []).append((start, start + _span(parameter), name))
                self.sizes[name] = parameter.numel()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:  # torch wraps a mode against compilation otherwise: 2 us per operation
        return False

    def source(self, spec: SourceSpec) -> Tensor:
        """Return the tensor that loading receives for a source."""
        tensor = torch.empty(spec.shape, dtype=spec.dtype, device="meta")
        return self._registered(_Values(tensor, (spec.name,), whole(spec.shape), spec.dtype))

    def _registered(self, values: _Values) -> Tensor:
        self._values[_storage(values.tensor)] = values
        return values.tensor

    def _of(self, leaf: object) -> _Values | None:
        """Return what an argument stands for; None if it depends on no source."""
        return self._values.get(_storage(leaf)) if isinstance(leaf, Tensor) and leaf.is_meta else None

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if _is_view(func):
            return func(*args, **kwargs)
        values = filter(None, map(self._of, _leaves((*args, *kwargs.values()))))
        names = dict.fromkeys(name for each in values for name in each.names)
        if not names:
            return self._without_sources(func, args, kwargs)
        if len(names) > 1:
            self.groups.add(frozenset(names))
        try:
            return self._follow(func, args, kwargs)
        except UntraceableError as error:
            new = dict.fromkeys(names.keys() - self.untraceable.keys(), str(error))
            self.untraceable |= new
            if isinstance(error, ConversionError):
                self.converted |= new.keys()
            return self._compute(func, args, kwargs, tuple(sorted(names)))

    def _follow(self, func: Any, args: tuple, kwargs: Mapping[str, Any]) -> Any:
        """Trace an operation that only moves values."""
        if func is _aten.copy_.default:
            return self._copy(args[0], args[1])
        if func is _aten.clone.default or func is _aten._to_copy.default:
            return self._clone(func, args[0], kwargs)
        if func is _aten.cat.default or func is _aten.stack.default:
            tensors, dim = args[0], args[1] if len(args) > 1 else kwargs.get("dim", 0)
            if func is _aten.stack.default:
                tensors = [tensor.unsqueeze(dim) for tensor in tensors]
            return self._cat(tensors, dim)
        if _is_composite(func):  # in inference mode they arrive undecomposed
            with self:
                return func.decompose(*args, **kwargs)
        raise UntraceableError(f"{func} computes with it")

    def _moved(self, tensor: Tensor) -> tuple[_Values, Origin]:
        """Return what a tensor stands for, and its origin."""
        values = self._of(tensor)
        if values is None:
            raise UntraceableError("it is combined with a tensor that is not a source")
        if values.origin is None:
            raise UntraceableError("it is computed")
        if tensor.dtype != values.dtype:
            raise UntraceableError("its bits are viewed as another dtype")
        return values, values.origin

    def _copy(self, target: Tensor, source: Tensor) -> Tensor:
        values, origin = self._moved(source)
        if target.numel() == 0:
            return target
        where = self._find(target)
        if where is None:
            raise UntraceableError("it is copied to a tensor that is not a parameter")
        parameter, offset = where
        dtype = self._parameters[parameter].dtype
        shape, strides = target.shape, target.stride()
        if target.dtype != dtype or any(step == 0 for n, step in zip(shape, strides, strict=True) if n > 1):
            raise UntraceableError(f"it is copied to a view of {parameter!r} with another dtype or with overlaps")
        if _rounding(values, dtype) not in (None, dtype):
            raise UntraceableError(f"it is rounded before it is cast to {dtype}")
        steps = source.stride() if source.shape == shape else source.expand(shape).stride()
        for piece in pieces(origin, int(source.storage_offset()), tuple(shape), steps, strides):
            name, at = values.names[piece.source], offset + piece.first
            copy = Copy(name, piece.box, parameter, at, piece.strides, dtype)
            self.writes.append(Write(parameter, at, piece.sizes, piece.steps, (name,), self.current, copy))
        return target

    def _clone(self, func: Any, tensor: Tensor, kwargs: Mapping[str, Any]) -> Tensor:
        values, origin = self._moved(tensor)
        inner = func(tensor, **{key: kwargs[key] for key in ("dtype", "memory_format") if key in kwargs})
        rounded = _rounding(values, inner.dtype)
        # The copy may have the layout of the view, with its dims in another order.
        order = sorted(range(inner.dim()), key=lambda dim: -inner.stride(dim))
        shape, strides = (tuple(of[dim] for dim in order) for of in (tensor.shape, tensor.stride()))
        origin, _ = trace(origin, int(tensor.storage_offset()), shape, strides)
        return self._registered(_Values(inner, values.names, origin, inner.dtype, rounded))

    def _cat(self, tensors: Sequence[Tensor], dim: int) -> Tensor:
        moved = [self._moved(tensor) for tensor in tensors]
        if len({(values.dtype, values.rounded) for values, _ in moved}) != 1:
            raise UntraceableError("it is concatenated with a tensor of another dtype")
        inner = torch.cat(list(tensors), dim).contiguous()
        dim, at, parts = dim % inner.dim(), 0, []
        names: dict[str, int] = {}
        for tensor, (values, origin) in zip(tensors, moved, strict=True):
            if tensor.numel() == 0:
                continue
            view, runs = trace(origin, int(tensor.storage_offset()), tuple(tensor.shape), tensor.stride())
            if len({run.view_dim for run in runs}) != len(runs):
                raise UntraceableError("it is flattened and concatenated")
            for part in view.parts:
                start, shape = [0] * inner.dim(), [1] * inner.dim()
                dims: list[int | None] = [None] * inner.dim()
                for number, run in enumerate(runs):
                    start[run.view_dim], shape[run.view_dim] = part.box.start[number], part.box.shape[number]
                    dims[run.view_dim] = part.dims[number]
                start[dim] += at
                source = names.setdefault(values.names[part.source], len(names))
                parts.append(Part(Box(tuple(start), tuple(shape)), source, part.start, tuple(dims)))
            at += tensor.shape[dim]
        first = moved[0][0]
        origin = Origin(tuple(inner.shape), tuple(parts))
        return self._registered(_Values(inner, tuple(names), origin, first.dtype, first.rounded))

    def _compute(self, func: Any, args: tuple, kwargs: Mapping[str, Any], names: tuple[str, ...]) -> Any:
        """Record the effect of the operation without executing it; its result was computed from `names`."""
        targets = _written(func, args, kwargs)
        for tensor in targets:
            values, where = self._of(tensor), self._find(tensor)
            if values is not None:
                values.origin, values.names = None, tuple({*values.names, *names})
            elif where is not None and tensor.numel():
                self._write(tensor, where, names, None)
        if targets:
            return _returned(func, targets)
        if func is _aten._local_scalar_dense.default or func is _aten.equal.default:
            self._read = names  # the value that follows is a placeholder
            return float("nan") if args[0].is_floating_point() else False
        args, options = tree_map(lambda x: x.to("meta") if isinstance(x, Tensor) else x, (args, dict(kwargs)))
        if "device" in options:
            options["device"] = torch.device("meta")
        try:
            out = func(*args, **options)
        except (RuntimeError, NotImplementedError) as error:
            raise RuntimeError(
                f"{func} of {list(names[:5])} cannot be traced without data ({error}); {_USE_STOCK_PATH}"
            ) from error
        for tensor in _leaves([out]):
            if isinstance(tensor, Tensor):
                self._registered(_Values(tensor, names, None, tensor.dtype))
        return out

    def _without_sources(self, func: Any, args: tuple, kwargs: Mapping[str, Any]) -> Any:
        targets = _written(func, args, kwargs)
        found = [(tensor, where) for tensor in targets if (where := self._find(tensor)) is not None]
        if not found:
            return func(*args, **kwargs)
        for tensor, where in found:
            if tensor.numel() == 0:
                continue
            value = _constant(func, args)
            if value is None or value != value:  # NaN: it was read from a source
                self._write(tensor, where, () if value is None else self._read, None)
            else:
                self._write(tensor, where, (), Fill(*where, tuple(tensor.shape), tensor.stride(), value))
        return _returned(func, targets)

    def _write(self, tensor: Tensor, where: tuple[str, int], names: tuple[str, ...], replay: Fill | None) -> None:
        self.writes.append(Write(*where, tuple(tensor.shape), tensor.stride(), names, self.current, replay))

    def _find(self, tensor: Tensor) -> tuple[str, int] | None:
        """Return the parameter that contains the elements of `tensor`, and its first element counted from the
        parameter's.
        """
        start = int(tensor.storage_offset())
        end = start + _span(tensor)
        for first, last, name in self._of_storage.get(_storage(tensor), ()):
            if first <= start and end <= last:
                return name, start - first
        return None


def _leaves(values: Iterable[Any]) -> Iterator[Any]:
    """Yield the arguments of an operation, including those in lists; operations accept no deeper nesting."""
    for value in values:
        if isinstance(value, list | tuple):
            yield from value
        else:
            yield value


@cache
def _is_view(func: Any) -> bool:
    """Return whether the operation returns nothing but views of its argument, whatever the argument."""
    if func in (_aten._unsafe_view.default, _aten.narrow.default):
        return True
    aliases = [argument.alias_info for argument in func._schema.arguments]
    return not _is_composite(func) and any(alias is not None and not alias.is_write for alias in aliases)


@cache
def _is_composite(func: Any) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd")


@cache
def _written_arguments(func: Any) -> tuple[tuple[int, str], ...]:
    arguments = enumerate(func._schema.arguments)
    return tuple((i, arg.name) for i, arg in arguments if arg.alias_info is not None and arg.alias_info.is_write)


def _written(func: Any, args: tuple, kwargs: Mapping[str, Any]) -> list[Tensor]:
    values = [args[i] if i < len(args) else kwargs.get(name) for i, name in _written_arguments(func)]
    return [leaf for leaf in _leaves(values) if isinstance(leaf, Tensor)]


def _returned(func: Any, tensors: list[Tensor]) -> Any:
    """Return the result of an operation that writes to `tensors`: the tensors, or nothing."""
    count = len(func._schema.returns)
    return None if count == 0 else tensors[0] if count == 1 else tuple(tensors)


def _constant(func: Any, args: tuple) -> float | None:
    """Return the value that an operation writes to every element; None if it does something else."""
    if func is _aten.zero_.default:
        return 0.0
    if func is _aten.fill_.Scalar:
        return float(args[1])
    if func is _aten.fill_.Tensor and not args[1].is_meta:
        return float(args[1].item())
    return None


def _rounding(values: _Values, dtype: torch.dtype) -> torch.dtype | None:
    """Return the dtype to which values have been rounded after a cast to `dtype`."""
    if values.dtype == dtype:
        return values.rounded
    if not (values.dtype.is_floating_point and dtype.is_floating_point):
        raise ConversionError(f"it is cast from {values.dtype} to {dtype}")
    old, new = torch.finfo(values.dtype), torch.finfo(dtype)
    exact = new.eps <= old.eps and new.max >= old.max and new.smallest_normal * new.eps <= old.smallest_normal * old.eps
    if exact:
        return values.rounded
    if values.rounded is not None:
        raise UntraceableError(f"it is rounded to {values.rounded} and then to {dtype}")
    return dtype


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _span(tensor: Tensor) -> int:
    """Return the number of elements from the first to the last one of `tensor`, including those in between."""
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
