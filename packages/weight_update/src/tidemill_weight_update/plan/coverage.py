"""Coverage: which elements of the parameters are written, and which more than once. Pure, numpy only."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from tidemill_weight_update.plan.origin import Origin, UntraceableError, trace
from tidemill_weight_update.tensors.box import Box

MAX_ELEMENTWISE = 1 << 27
"""Parameters that are not written in boxes are checked element by element up to this size."""


@dataclass(frozen=True, slots=True)
class Place:
    """Shape and strides (in elements) of a parameter."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Write:
    """A write of loading to elements `offset + sum(i_d * strides[d])` of `parameter`, for all `i` below `shape`.

    Attributes:
        kind: "copy" of a source and "fill" with a constant can be replayed; "loader" requires `load_weights`.
        parameter: name of the parameter.
        offset: first element.
        shape: sizes.
        strides: strides in elements.
        names: sources of the values; empty for a fill, and for values that depend on no source.
        during: source that loading had requested last; None before the first and after the last one.
    """

    kind: Literal["copy", "fill", "loader"]
    parameter: str
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    names: tuple[str, ...]
    during: str | None


@dataclass(slots=True)
class Coverage:
    """The elements of the parameters that writes hit.

    Attributes:
        uncovered: parameter -> number of elements that nothing writes, or only code that runs before or after the
            sources are loaded.
        overwritten: parameter -> number of elements that more than one write hits.
        unknown: parameters that are too large and written in too scattered a way to check.
    """

    uncovered: dict[str, int] = field(default_factory=dict)
    overwritten: dict[str, int] = field(default_factory=dict)
    unknown: set[str] = field(default_factory=set)


def survey(places: Mapping[str, Place], writes: Sequence[Write]) -> Coverage:
    """Count writes, exactly for each element. No write may hit an element twice by itself."""
    of_parameter: dict[str, list[int]] = {name: [] for name in places}
    for index, write in enumerate(writes):
        of_parameter[write.parameter].append(index)
    coverage = Coverage()
    for name, indices in of_parameter.items():
        place = places[name]
        numel = Box.whole(place.shape).numel
        if len(indices) == 1 and writes[indices[0]].names and Box.whole(writes[indices[0]].shape).numel == numel:
            continue
        if numel:
            _survey_parameter(coverage, name, place, {index: writes[index] for index in indices})
    return coverage


class _CellGrid:
    """Cells of a parameter, and the cells that each write hits, as views into arrays of the grid's shape.

    Attributes:
        numel: number of elements in each cell.
    """

    def __init__(self, place: Place, writes: Mapping[int, Write]) -> None:
        """Raise UntraceableError if the number of cells is too large."""
        order = sorted(range(len(place.shape)), key=lambda dim: -place.strides[dim])
        shape = tuple(place.shape[dim] for dim in order)
        strides = tuple(place.strides[dim] for dim in order)
        span = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
        self._writes = writes
        self._slices: dict[int, list[tuple[slice, ...]]] | None = None
        boxes = _boxes(shape, writes) if span == Box.whole(shape).numel else None
        if boxes is None:  # element by element
            self.shape = (span,)
            self._check_size()
            self.numel = np.zeros(span, np.int64)
            np.lib.stride_tricks.as_strided(self.numel, shape, [stride * 8 for stride in strides])[...] = 1
            return
        cuts = [{0, size} for size in shape]
        for box in (box for parts in boxes.values() for box in parts):
            for dim, (start, size) in enumerate(zip(box.start, box.shape, strict=True)):
                cuts[dim] |= {start, start + size}
        edges = [sorted(cut) for cut in cuts]
        self.shape = tuple(len(edge) - 1 for edge in edges)
        self._check_size()
        self.numel = np.ones(self.shape, np.int64)
        for dim, edge in enumerate(edges):
            self.numel *= np.diff(edge).reshape([-1 if d == dim else 1 for d in range(len(self.shape))])
        cell_of = [{position: cell for cell, position in enumerate(edge)} for edge in edges]
        self._slices = {
            index: [
                tuple(slice(cell[a], cell[a + n]) for cell, a, n in zip(cell_of, box.start, box.shape, strict=True))
                for box in parts
            ]
            for index, parts in boxes.items()
        }

    def _check_size(self) -> None:
        if Box.whole(self.shape).numel > MAX_ELEMENTWISE:
            raise UntraceableError(
                f"the copies split the parameter into more than {MAX_ELEMENTWISE} boxes (limit of tracing)"
            )

    def hit(self, index: int, cells: NDArray) -> Iterator[NDArray]:
        """Yield the cells that the write hits, of an array in the shape of the grid."""
        if self._slices is None:
            write = self._writes[index]
            strides = [stride * cells.itemsize for stride in write.strides]
            yield np.lib.stride_tricks.as_strided(cells[write.offset :], write.shape, strides)
        else:
            for cut in self._slices[index]:
                yield cells[cut]


def _boxes(shape: tuple[int, ...], writes: Mapping[int, Write]) -> dict[int, list[Box]] | None:
    """Return each write as boxes of a contiguous parameter; None if a write is not made of boxes."""
    whole = Origin.source("", shape)
    boxes = {}
    for index, write in writes.items():
        try:
            parts = trace(whole, write.offset, write.shape, write.strides)[0].parts
        except UntraceableError:
            return None
        boxes[index] = [_place(part.start, part.box.shape, part.dims) for part in parts]
    return boxes


def _place(start: tuple[int, ...], sizes: tuple[int, ...], dims: tuple[int | None, ...]) -> Box:
    shape = [1] * len(start)
    for size, dim in zip(sizes, dims, strict=True):
        if dim is not None:
            shape[dim] = size
    return Box(start, tuple(shape))


def _survey_parameter(coverage: Coverage, name: str, place: Place, writes: Mapping[int, Write]) -> None:
    try:
        grid = _CellGrid(place, writes)
    except UntraceableError:
        coverage.unknown.add(name)
        return
    count = np.zeros(grid.shape, np.int8)  # number of writes, at most 2
    covered = np.zeros(grid.shape, bool)
    for index, write in writes.items():
        for view in grid.hit(index, count):
            np.minimum(view + 1, 2, out=view)
        if write.names or write.kind == "fill" or write.during is not None:
            for view in grid.hit(index, covered):
                view[...] = True
    if uncovered := int(grid.numel[~covered].sum()):
        coverage.uncovered[name] = uncovered
    if overwritten := int(grid.numel[count > 1].sum()):
        coverage.overwritten[name] = overwritten


def left_to_loader(coverage: Coverage, writes: Sequence[Write], names: Mapping[str, str]) -> dict[str, str]:
    """Return name -> reason for the sources that `load_weights` must load, so that a replay has the same result.

    A replay writes the fills, then the copies, then calls `load_weights` with these names. That changes the order of
    writes, so all writes to a parameter are left to `load_weights` if two of them hit the same element.

    Args:
        names: sources that are already left to `load_weights`.
    """
    left = dict(names)
    for write in writes:
        loading = write.names or (() if write.during is None else (write.during,))
        if write.kind == "loader" and not write.names:
            reason = f"loading it writes values to {write.parameter!r} that are not copies"
        elif write.parameter in coverage.unknown:
            reason = f"{write.parameter!r} is too large to check its scattered writes"
        elif write.parameter in coverage.overwritten:
            reason = f"elements of {write.parameter!r} are written more than once"
        else:
            continue
        for name in loading:
            left.setdefault(name, reason)
    return left
