"""Origins: from which box of which source each element of a tensor was copied. Pure arithmetic on shapes."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from tidemill_weight_update.tensors import Box, contiguous_strides

MAX_PARTS = 1024
"""Views that consist of more boxes than this are not traced."""


class UntraceableError(Exception):
    """The view has no short description by boxes; the message contains the reason."""


@dataclass(frozen=True, slots=True)
class Part:
    """`box` of a tensor holds the values of a source from index `start` on; dim d follows source dim `dims[d]`.

    `source` is the source's index among those of the tensor. `dims[d]` is None where the box has size 1.
    """

    box: Box
    source: int
    start: tuple[int, ...]
    dims: tuple[int | None, ...]


@dataclass(frozen=True, slots=True)
class Origin:
    """The sources of a contiguous tensor of this shape, as disjoint parts that cover it."""

    shape: tuple[int, ...]
    parts: tuple[Part, ...]


@lru_cache(maxsize=4096)
def whole(shape: tuple[int, ...]) -> Origin:
    """Return the origin of a source itself."""
    dims = tuple(None if size == 1 else dim for dim, size in enumerate(shape))
    return Origin(shape, (Part(Box.whole(shape), 0, (0,) * len(shape), dims),))


@dataclass(frozen=True, slots=True)
class Run:
    """`size` steps of `step` indices each along dim `view_dim` of a view; `origin_dim` is the dim they follow.

    If `origin_dim` is None, they follow no dim index by index (broadcast, every n-th element); each step is a part of
    its own.
    """

    view_dim: int
    step: int
    size: int
    origin_dim: int | None


@lru_cache(maxsize=4096)  # a model has thousands of expert weights of the same few shapes
def trace(
    origin: Origin, offset: int, shape: tuple[int, ...], strides: tuple[int, ...]
) -> tuple[Origin, tuple[Run, ...]]:
    """Return the origin of the elements of a view.

    Args:
        offset: first element of the view, in elements of that tensor.
        strides: strides of the view, in elements of that tensor.

    Returns:
        The origin of the view, with one dim per run, and the runs in the order of the view's dims. Dims of size 1 have
        no run; a dim that was flattened from several dims has one run for each.
    """
    runs = _runs(origin.shape, shape, strides)
    counted = [run.size if run.origin_dim is None else 1 for run in runs]
    parts = []
    for index in itertools.product(*map(range, counted)):
        first = offset + sum(i * run.step * strides[run.view_dim] for i, run in zip(index, runs, strict=True))
        box, run_of_dim = _box(origin.shape, first, runs)
        for part in origin.parts:
            common = box.intersect(part.box)
            if common is not None:
                parts.append(_part(part, common, box, index, runs, run_of_dim))
        if len(parts) > MAX_PARTS:
            raise UntraceableError(f"the view consists of more than {MAX_PARTS} boxes")
    return Origin(tuple(run.size for run in runs), tuple(parts)), runs


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a copy.

    Attributes:
        box: its box there.
        first: its first element in the target.
        strides: strides in the target by dim of the box.
        sizes, steps: sizes and strides in the target, by dim of the copy.
    """

    source: int
    box: Box
    first: int
    strides: tuple[int, ...]
    sizes: tuple[int, ...]
    steps: tuple[int, ...]


@lru_cache(maxsize=4096)
def pieces(
    origin: Origin, offset: int, shape: tuple[int, ...], steps: tuple[int, ...], target_steps: tuple[int, ...]
) -> tuple[Piece, ...]:
    """Return the parts of a copy from a view of a tensor with `origin` to a view of a parameter."""
    shape, steps, target_steps = _joined(shape, steps, target_steps)
    moved, runs = trace(origin, offset, shape, steps)
    run_steps = tuple(target_steps[run.view_dim] * run.step for run in runs)
    found = []
    for part in moved.parts:
        first = sum(i * step for i, step in zip(part.box.start, run_steps, strict=True))
        sizes, strides = [1] * len(part.start), [0] * len(part.start)
        for size, step, dim in zip(part.box.shape, run_steps, part.dims, strict=True):
            if dim is not None:
                sizes[dim], strides[dim] = size, step
        box = Box(part.start, tuple(sizes))
        found.append(Piece(part.source, box, first, tuple(strides), part.box.shape, run_steps))
    return tuple(found)


def _joined(
    shape: Sequence[int], steps: Sequence[int], target_steps: Sequence[int]
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Return the same copy without dims of size 1, and with neighbouring dims joined that are one run on both sides."""
    dims: list[tuple[int, int, int]] = []
    for size, step, target_step in zip(shape, steps, target_steps, strict=True):
        if size == 1:
            continue
        if dims and dims[-1][1:] == (step * size, target_step * size):
            dims[-1] = dims[-1][0] * size, step, target_step
        else:
            dims.append((size, step, target_step))
    return tuple(dim[0] for dim in dims), tuple(dim[1] for dim in dims), tuple(dim[2] for dim in dims)


def _runs(base: tuple[int, ...], shape: Sequence[int], strides: Sequence[int]) -> tuple[Run, ...]:
    steps = contiguous_strides(base)
    dim_of = {step: dim for dim, (step, size) in enumerate(zip(steps, base, strict=True)) if size > 1}
    runs = []
    for view_dim, (size, stride) in enumerate(zip(shape, strides, strict=True)):
        if size == 1:
            continue
        if stride not in dim_of:
            runs.append(Run(view_dim, 1, size, None))
            continue
        # A dim that is longer than the one it follows continues along the next outer one.
        dim, step, split = dim_of[stride], 1, []
        while size > base[dim] and dim > 0:
            if size % base[dim]:
                raise UntraceableError("a view cuts a flattened dimension in the middle of a row")
            if base[dim] > 1:
                split.append(Run(view_dim, step, base[dim], dim))
            size, step, dim = size // base[dim], step * base[dim], dim - 1
        if size > 1:
            split.append(Run(view_dim, step, size, dim))
        runs += reversed(split)
    return tuple(runs)


def _box(base: tuple[int, ...], first: int, runs: tuple[Run, ...]) -> tuple[Box, dict[int, int]]:
    """Return the box that starts at element `first` and follows `runs`, and the run of each dim that has one."""
    start = []
    for step in contiguous_strides(base):
        index, first = divmod(first, max(step, 1))
        start.append(index)
    box_shape, run_of_dim = [1] * len(base), {}
    for number, run in enumerate(runs):
        dim = run.origin_dim
        if dim is None:
            continue
        if dim in run_of_dim:
            raise UntraceableError("two dimensions of the view index the same source dimension")
        if start[dim] + run.size > base[dim]:
            raise UntraceableError("a view cuts a flattened dimension in the middle of a row")
        run_of_dim[dim], box_shape[dim] = number, run.size
    return Box(tuple(start), tuple(box_shape)), run_of_dim


def _part(
    part: Part, common: Box, box: Box, index: tuple[int, ...], runs: tuple[Run, ...], run_of_dim: dict[int, int]
) -> Part:
    """Return `common`, the intersection of `box` with that of `part`, as a part of the view with the dims `runs`."""
    start = list(part.start)
    at, size = list(index), [1] * len(runs)
    dims: list[int | None] = [None] * len(runs)
    for dim, source_dim in enumerate(part.dims):
        if source_dim is not None:
            start[source_dim] += common.start[dim] - part.box.start[dim]
        if dim in run_of_dim:
            number = run_of_dim[dim]
            at[number] = common.start[dim] - box.start[dim]
            size[number] = common.shape[dim]
            dims[number] = source_dim if common.shape[dim] > 1 else None
    return Part(Box(tuple(at), tuple(size)), part.source, tuple(start), tuple(dims))
