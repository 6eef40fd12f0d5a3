"""Recording: runs a model's own `load_weights` on tensors without data to obtain a copy plan."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import compress

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from tidemill_weight_update.copy.table import Copy
from tidemill_weight_update.plan.plan import CopyPlan, Fill
from tidemill_weight_update.plan.tracer import Tracer, Write
from tidemill_weight_update.tensors import SourceSpec

_HINT = "; compare this name and shape with those of the engine's checkpoint"
_FP8_HINT = (
    "; only one of the engine and the sent tensors is in block-wise float8: launch the engine with fp8_launch_args() "
    "of tidemill_weight_update.fp8, and send BlockFp8(named_tensors).quantize()"
)


def record(model: nn.Module, sources: Sequence[SourceSpec]) -> CopyPlan:
    """Run `model.load_weights` on `sources` without data and record what it copies where.

    No parameter is written, and parameters may be on the meta device. Pass all sources at once: some are loaded
    together.

    The tensors passed to `load_weights` are on the meta device: SGLang loads CPU tensors in other threads, but not
    these. A copy in another thread is an error, because there is no data to copy; constants that another thread writes
    to a parameter are written for real.

    Raises:
        RuntimeError: `load_weights` failed, did something that cannot be traced without data, or replaced the memory of
            a parameter.
    """
    parameters = dict(model.named_parameters())
    data = {name: parameter.data for name, parameter in parameters.items()}
    tracer = Tracer(data)
    tensors = [tracer.source(spec) for spec in sources]  # here, where no operation is watched
    where = "before it requested a source"

    def named_tensors() -> Iterator[tuple[str, Tensor]]:
        nonlocal where
        for spec, tensor in zip(sources, tensors, strict=True):
            tracer.current = spec.name
            where = f"at source {spec.name!r} {spec.shape} {spec.dtype}"
            yield spec.name, tensor
        tracer.current = None
        where = f"after it had received all {len(sources)} sources"

    what = f"{type(model).__name__}.load_weights"
    try:
        with tracer:
            model.load_weights(named_tensors())  # pyright: ignore[reportCallIssue]
    except Exception as error:
        hint = _FP8_HINT if _is_fp8(data.values()) != _is_fp8(sources) else _HINT
        raise RuntimeError(f"{what} failed {where}: {type(error).__name__}: {error}{hint}") from error
    finally:
        moved = _put_back(parameters, data)
    now = dict(model.named_parameters())
    moved += [name for name in now.keys() | parameters.keys() if now.get(name) is not parameters.get(name)]
    if moved:
        raise RuntimeError(
            f"{what} replaced the memory or shape of {moved[0]!r} ({len(moved)} parameters in total): the engine keeps "
            f"its weights in another layout than the one it loads. Launch it without the tidemill loader, so that it "
            f"is updated through SGLang's own loader"
        )
    return _plan(tracer, [source.name for source in sources])


def _is_fp8(tensors: Iterable[Tensor | SourceSpec]) -> bool:
    return any(tensor.dtype.itemsize == 1 and tensor.dtype.is_floating_point for tensor in tensors)


def _put_back(parameters: Mapping[str, nn.Parameter], data: Mapping[str, Tensor]) -> list[str]:
    """Restore the parameters' original memory; return the names of those that had lost it."""
    moved = []
    for name, parameter in parameters.items():
        before = data[name]
        if _layout(parameter) != _layout(before):
            parameter.data = before
            moved.append(name)
    return moved


def _layout(tensor: Tensor) -> tuple:
    storage = tensor.untyped_storage()._cdata
    return storage, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype


MAX_RUNS = 1 << 22
"""Parameters whose writes have more runs of neighbouring elements than this are not checked."""


@dataclass(slots=True)
class _Coverage:
    """The elements of the parameters that writes hit.

    Attributes:
        uncovered: parameter -> number of elements that nothing writes, or only code that runs before or after the
            sources are loaded.
        overwritten: parameters with elements that are written more than once.
        unknown: parameters whose writes are too scattered to count.
    """

    uncovered: dict[str, int] = field(default_factory=dict)
    overwritten: set[str] = field(default_factory=set)
    unknown: set[str] = field(default_factory=set)


def _survey(sizes: Mapping[str, int], writes: Sequence[Write]) -> _Coverage:
    """Count writes, exactly for each element. No write may hit an element twice by itself."""
    of_parameter: dict[str, list[Write]] = {name: [] for name in sizes}
    for write in writes:
        of_parameter[write.parameter].append(write)
    coverage = _Coverage()
    for name, group in of_parameter.items():
        joined = [_joined(write) for write in group]
        if sum(math.prod(size for _, size in outer) for _, outer in joined) > MAX_RUNS:
            coverage.unknown.add(name)
            continue
        runs = [(_starts(write.offset, outer), length) for write, (length, outer) in zip(group, joined, strict=True)]
        loading = [write.names or isinstance(write.replay, Fill) or write.during is not None for write in group]
        covered, _ = _count(list(compress(runs, loading)))
        _, overwritten = _count(runs)
        if covered < sizes[name]:
            coverage.uncovered[name] = sizes[name] - covered
        if overwritten:
            coverage.overwritten.add(name)
    return coverage


def _joined(write: Write) -> tuple[int, list[tuple[int, int]]]:
    """Return the length of the runs of neighbouring elements that a write hits, and stride and size of other dims."""
    length, outer = 1, []
    for stride, size in sorted(zip(write.strides, write.shape, strict=True)):
        if stride == length:
            length *= size
        else:
            outer.append((stride, size))
    return length, outer


def _starts(offset: int, outer: Sequence[tuple[int, int]]) -> NDArray[np.int64]:
    starts = np.array([offset])
    for stride, size in outer:
        starts = (starts[:, None] + np.arange(size) * stride).ravel()
    return starts


def _count(runs: Sequence[tuple[NDArray[np.int64], int]]) -> tuple[int, int]:
    """Return how many elements are in runs, and how many in more than one."""
    if not runs:
        return 0, 0
    starts = np.concatenate([each for each, _ in runs])
    ends = np.concatenate([each + length for each, length in runs])
    at = np.concatenate([starts, ends])
    order = np.argsort(at)
    depth = np.cumsum(np.where(order < len(starts), 1, -1))[:-1]
    lengths = np.diff(at[order])
    return int(lengths[depth > 0].sum()), int(lengths[depth > 1].sum())


def _left_to_loader(coverage: _Coverage, writes: Sequence[Write], names: Mapping[str, str]) -> dict[str, str]:
    """Return name -> reason for the sources that `load_weights` must load, so that a replay has the same result.

    A replay writes the fills, then the copies, then calls `load_weights` with these names. That changes the order of
    writes, so all writes to a parameter are left to `load_weights` if two of them hit the same element.
    """
    left = dict(names)
    for write in writes:
        loading = write.names or (() if write.during is None else (write.during,))
        if write.replay is None and not write.names:
            reason = f"loading it writes values to {write.parameter!r} that are not copies"
        elif write.parameter in coverage.unknown:
            reason = f"the writes to {write.parameter!r} are too scattered to check"
        elif write.parameter in coverage.overwritten:
            reason = f"elements of {write.parameter!r} are written more than once"
        else:
            continue
        for name in loading:
            left.setdefault(name, reason)
    return left


def _plan(tracer: Tracer, names: Sequence[str]) -> CopyPlan:
    coverage = _survey(tracer.sizes, tracer.writes)
    left = _left_to_loader(coverage, tracer.writes, tracer.untraceable)
    for group in _merged(tracer.groups):
        if reasons := [left[name] for name in group if name in left]:
            for name in group:
                left.setdefault(name, f"it is loaded together with a tensor that is not copied: {reasons[0]}")
    replays = [write.replay for write in tracer.writes]
    fills = [replay for replay in replays if isinstance(replay, Fill)]
    copies = [replay for replay in replays if isinstance(replay, Copy) and replay.name not in left]
    return CopyPlan(
        copies=tuple(copies),
        fills=tuple(fills),
        through_loader={name: left[name] for name in names if name in left},
        converted=tuple(name for name in names if name in tracer.converted),
        uncovered=coverage.uncovered,
    )


def _merged(groups: Iterable[frozenset[str]]) -> list[set[str]]:
    """Merge groups that share a name."""
    group_of: dict[str, set[str]] = {}
    for group in groups:
        joined = set(group).union(*(group_of.get(name, ()) for name in group))
        group_of |= dict.fromkeys(joined, joined)
    return list({id(group): group for group in group_of.values()}.values())
