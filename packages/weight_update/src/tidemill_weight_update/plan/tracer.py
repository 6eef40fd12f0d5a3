"""The tracer: follows the sources through a model's loading code to the parameters."""

import threading
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from tidemill_weight_update.plan.coverage import Place, Write
from tidemill_weight_update.plan.origin import Origin, Part, UntraceableError, trace
from tidemill_weight_update.plan.plan import Copy, Fill
from tidemill_weight_update.plan.traced import (
    ConversionError,
    Traced,
    constant,
    is_view,
    origin_of,
    returned,
    rounding,
    traced_arguments,
    view_of,
    written,
)
from tidemill_weight_update.tensors.box import Box, SourceSpec

_aten = torch.ops.aten
_CLONES = (_aten.clone.default, _aten._to_copy.default)
_USE_STOCK_PATH = "launch this engine without the tidemill loader, so that it is updated on the stock path"


class Tracer:
    """Records the writes to the parameters instead of executing them.

    Attributes:
        places: shape and strides of each parameter, for `coverage`.
        writes: writes in their order, for `coverage`.
        replays: copy or fill of each write; None if the write cannot be replayed.
        untraceable: source -> reason, for sources that were used in other ways than copies.
        converted: sources among them that were cast between integers and floating-point numbers.
        groups: sets of names that an operation combined.
        current: source that loading requested last; None before the first and after the last one.
    """

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        self.places: dict[str, Place] = {}
        self.writes: list[Write] = []
        self.replays: list[Copy | Fill | None] = []
        self.untraceable: dict[str, str] = {}
        self.converted: set[str] = set()
        self.groups: set[frozenset[str]] = set()
        self.current: str | None = None
        self._parameters = parameters
        self._of_storage: dict[int, list[tuple[int, int, str]]] = {}  # first element, end, name
        self._lock = threading.RLock()
        self._thread = threading.get_ident()
        self._read: tuple[str, ...] = ()
        for name, parameter in parameters.items():
            place = Place(tuple(parameter.shape), parameter.stride())
            start = _offset(parameter)
            others = self._of_storage.setdefault(parameter.untyped_storage()._cdata, [])
            if all((start, place) != (at, self.places[other]) for at, _, other in others):  # otherwise it is an alias
                others.append((start, start + _span(parameter), name))
                self.places[name] = place

    def source(self, spec: SourceSpec) -> Traced:
        """Return the tensor that loading receives for a source."""
        inner = torch.empty(spec.shape, dtype=spec.dtype, device="meta")
        return Traced(self, inner, Origin.source(spec.name, spec.shape), frozenset([spec.name]))

    def run(self, func: Any, args: tuple, kwargs: Mapping[str, Any]) -> Any:
        """Execute an operation of the model's loading as far as required."""
        traced = traced_arguments(args, kwargs)
        with self._lock:
            if not traced:
                return self._without_sources(func, args, kwargs)
            names = frozenset[str]().union(*(tensor.sources for tensor in traced))
            if len(names) > 1:
                self.groups.add(names)
            try:
                return self._follow(func, args, kwargs)
            except UntraceableError as error:
                new = dict.fromkeys(names - self.untraceable.keys(), str(error))
                self.untraceable |= new
                if isinstance(error, ConversionError):
                    self.converted |= new.keys()
                return self._compute(func, args, kwargs, names)

    def _follow(self, func: Any, args: tuple, kwargs: Mapping[str, Any]) -> Any:
        """Trace an operation that only moves values.

        Raises:
            UntraceableError: the operation does more than move values.
        """
        if func is _aten.copy_.default:
            return self._copy(args[0], args[1])
        if func in _CLONES:
            return self._clone(func, args[0], kwargs)
        if func is _aten.cat.default or func is _aten.stack.default:
            tensors, dim = args[0], args[1] if len(args) > 1 else kwargs.get("dim", 0)
            if func is _aten.stack.default:
                tensors = [view_of(tensor, _aten.unsqueeze.default, dim) for tensor in tensors]
            return self._cat(tensors, dim)
        if func is _aten.narrow.default:
            return view_of(args[0], func, *args[1:], **kwargs)
        # In inference mode, without autograd's dispatch keys, composite operations arrive undecomposed.
        out = func.decompose(*args, **kwargs)
        if out is not NotImplemented:
            return out
        if is_view(func):
            return view_of(args[0], func, *args[1:], **kwargs)
        raise UntraceableError(f"{func} computes with it")

    def _copy(self, target: Tensor, source: Tensor) -> Tensor:
        if not isinstance(source, Traced):
            raise UntraceableError("another tensor is copied to it")
        origin = origin_of(source)
        if target.numel() == 0:
            return target
        where = self._find(target)
        if where is None:
            raise UntraceableError("it is copied to a tensor that is not a parameter")
        parameter, offset = where
        dtype = self._parameters[parameter].dtype
        if target.dtype != dtype or any(
            step == 0 for n, step in zip(target.shape, target.stride(), strict=True) if n > 1
        ):
            raise UntraceableError(f"it is copied to a view of {parameter!r} with another dtype or with overlaps")
        if rounding(source, dtype) not in (None, dtype):
            raise UntraceableError(f"it is rounded before it is cast to {dtype}")
        inner = source.stand_in.expand(target.shape)
        shape, steps, target_steps = _joined(target.shape, inner.stride(), target.stride())
        moved, runs = trace(origin, _offset(inner), shape, steps)
        run_steps = tuple(target_steps[run.view_dim] * run.step for run in runs)
        for part in moved.parts:
            first = offset + sum(i * step for i, step in zip(part.box.start, run_steps, strict=True))
            sizes, strides = [1] * len(part.start), [0] * len(part.start)
            for size, step, dim in zip(part.box.shape, run_steps, part.dims, strict=True):
                if dim is not None:
                    sizes[dim], strides[dim] = size, step
            copy = Copy(part.name, Box(part.start, tuple(sizes)), parameter, first, tuple(strides), dtype)
            self._write("copy", parameter, first, part.box.shape, run_steps, (part.name,), copy)
        return target

    def _clone(self, func: Any, tensor: Traced, kwargs: Mapping[str, Any]) -> Traced:
        options = {key: kwargs[key] for key in ("dtype", "memory_format") if key in kwargs}
        inner = func(tensor.stand_in, **options)
        rounded = rounding(tensor, inner.dtype)
        origin, runs = trace(origin_of(tensor), _offset(tensor.stand_in), tensor.shape, tensor.stand_in.stride())
        # The copy may have the layout of the view, with its dims in another order.
        order = sorted(range(len(runs)), key=lambda run: -inner.stride(runs[run].view_dim))
        parts = tuple(
            Part(_permuted_box(part.box, order), part.name, part.start, tuple(part.dims[run] for run in order))
            for part in origin.parts
        )
        shape = tuple(origin.shape[run] for run in order)
        return Traced(self, inner, Origin(shape, parts), tensor.sources, rounded)

    def _cat(self, tensors: Sequence[Tensor], dim: int) -> Traced:
        origins = [origin_of(tensor) for tensor in tensors]
        traced = [tensor for tensor in tensors if isinstance(tensor, Traced)]
        if len({(tensor.dtype, tensor.rounded) for tensor in traced}) != 1:
            raise UntraceableError("it is concatenated with a tensor of another dtype")
        inner = torch.cat([tensor.stand_in for tensor in traced], dim).contiguous()
        dim, at, parts = dim % inner.dim(), 0, []
        for tensor, origin in zip(traced, origins, strict=True):
            if tensor.numel() == 0:
                continue
            moved, runs = trace(origin, _offset(tensor.stand_in), tensor.shape, tensor.stand_in.stride())
            if len({run.view_dim for run in runs}) != len(runs):
                raise UntraceableError("it is flattened and concatenated")
            for part in moved.parts:
                start, shape = [0] * inner.dim(), [1] * inner.dim()
                dims: list[int | None] = [None] * inner.dim()
                for number, run in enumerate(runs):
                    start[run.view_dim], shape[run.view_dim] = part.box.start[number], part.box.shape[number]
                    dims[run.view_dim] = part.dims[number]
                start[dim] += at
                parts.append(Part(Box(tuple(start), tuple(shape)), part.name, part.start, tuple(dims)))
            at += tensor.shape[dim]
        names = frozenset[str]().union(*(tensor.sources for tensor in traced))
        return Traced(self, inner, Origin(tuple(inner.shape), tuple(parts)), names, traced[0].rounded)

    def _compute(self, func: Any, args: tuple, kwargs: Mapping[str, Any], names: frozenset[str]) -> Any:
        """Record the effect of the operation without executing it; its result was computed from `names`."""
        targets = written(func, args, kwargs)
        for tensor in targets:
            where = self._find(tensor)
            if isinstance(tensor, Traced):
                tensor.origin, tensor.sources = None, tensor.sources | names
            elif where is not None and tensor.numel():
                parameter, offset = where
                order = tuple(sorted(names))
                self._write("loader", parameter, offset, tuple(tensor.shape), tensor.stride(), order, None)
        if targets:
            return returned(func, targets)
        if func is _aten._local_scalar_dense.default or func is _aten.equal.default:
            return self._value(args[0], names)
        args, options = tree_map(_without_data, (args, dict(kwargs)))
        if "device" in options:
            options["device"] = torch.device("meta")
        try:
            out = func(*args, **options)
        except (RuntimeError, NotImplementedError) as error:
            raise RuntimeError(
                f"{func} of {sorted(names)[:5]} cannot be traced without data ({error}); {_USE_STOCK_PATH}"
            ) from error
        return tree_map(lambda leaf: Traced(self, leaf, None, names) if isinstance(leaf, Tensor) else leaf, out)

    def _value(self, tensor: Tensor, names: frozenset[str]) -> float | bool:
        """Return a placeholder for a value that loading reads from a source."""
        if threading.get_ident() != self._thread:
            # It may be written to a parameter next, and operations of another thread are not traced.
            raise RuntimeError(
                f"the value of {sorted(names)[:5]} is read in another thread than the one that loads; {_USE_STOCK_PATH}"
            )
        self._read = tuple(sorted(names))
        return float("nan") if tensor.is_floating_point() else False

    def _without_sources(self, func: Any, args: tuple, kwargs: Mapping[str, Any]) -> Any:
        targets = written(func, args, kwargs)
        found = [self._find(tensor) for tensor in targets]
        if not any(found):
            return func(*args, **kwargs)
        for tensor, where in zip(targets, found, strict=True):
            if where is None or tensor.numel() == 0:
                continue
            parameter, offset = where
            shape, strides = tuple(tensor.shape), tensor.stride()
            value = constant(func, args)
            if value is None or value != value:  # NaN: it was read from a source
                names = () if value is None else self._read
                self._write("loader", parameter, offset, shape, strides, names, None)
            else:
                fill = Fill(parameter, offset, shape, strides, value)
                self._write("fill", parameter, offset, shape, strides, (), fill)
        return returned(func, targets)

    def _write(
        self,
        kind: Literal["copy", "fill", "loader"],
        parameter: str,
        offset: int,
        shape: tuple[int, ...],
        strides: tuple[int, ...],
        names: tuple[str, ...],
        replay: Copy | Fill | None,
    ) -> None:
        self.writes.append(Write(kind, parameter, offset, shape, strides, names, self.current))
        self.replays.append(replay)

    def _find(self, tensor: Tensor) -> tuple[str, int] | None:
        """Return the parameter that contains the elements of `tensor`, and its first element counted from the
        parameter's.
        """
        if isinstance(tensor, Traced):
            return None
        start = _offset(tensor)
        for first, end, name in self._of_storage.get(tensor.untyped_storage()._cdata, ()):
            if first <= start and start + _span(tensor) <= end:
                return name, start - first
        return None


def _joined(
    shape: Sequence[int], steps: Sequence[int], target_steps: Sequence[int]
) -> tuple[list[int], list[int], list[int]]:
    """Return the same copy with as few dims as possible: neighbouring dims that are one run on both sides
    are joined.
    """
    out: tuple[list[int], list[int], list[int]] = ([], [], [])
    for size, step, target_step in zip(shape, steps, target_steps, strict=True):
        if size == 1:
            continue
        if out[0] and out[1][-1] == step * size and out[2][-1] == target_step * size:
            out[0][-1], out[1][-1], out[2][-1] = out[0][-1] * size, step, target_step
        else:
            for values, value in zip(out, (size, step, target_step), strict=True):
                values.append(value)
    return out


def _permuted_box(box: Box, order: Sequence[int]) -> Box:
    return Box(tuple(box.start[dim] for dim in order), tuple(box.shape[dim] for dim in order))


def _offset(tensor: Tensor) -> int:
    return int(tensor.storage_offset())


def _span(tensor: Tensor) -> int:
    """Return the number of elements from the first to the last one of `tensor`, including those in between."""
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _without_data(leaf: Any) -> Any:
    return leaf.stand_in if isinstance(leaf, Traced) else leaf.to("meta") if isinstance(leaf, Tensor) else leaf
