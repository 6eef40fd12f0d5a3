"""Groups of neighbouring rows as rows, and back."""

from collections.abc import Mapping

import numpy as np

from tidemill_dataproto.arrays import object_column
from tidemill_dataproto.layout import JaggedColumn, Layout
from tidemill_dataproto.tensors import Column

__all__ = ["fold", "unfold"]

_Folded = tuple[int, dict[str, Column], dict[str, np.ndarray]]
_SUFFIX = ".lengths"


def fold(columns: Mapping[str, Column], arrays: Mapping[str, np.ndarray], num_rows: int, size: int) -> _Folded:
    """Number of groups, columns and numpy columns; see `DataProto.fold`."""
    if size < 1 or num_rows % size != 0:
        raise ValueError(f"{num_rows} rows do not divide into groups of {size}")
    count = num_rows // size
    folded: dict[str, Column] = {}
    others = {name: _fold_array(array, count, size) for name, array in arrays.items()}
    layouts: dict[int, Layout] = {}
    for name, column in columns.items():
        if not isinstance(column, JaggedColumn):
            folded[name] = column.unflatten(0, (count, size))
            continue
        if name + _SUFFIX in columns or name + _SUFFIX in arrays:
            raise ValueError(f"column {name + _SUFFIX!r} is in the way of the row lengths of {name!r}; rename it")
        layout = column.layout
        if layout.key not in layouts:
            layouts[layout.key] = Layout(layout.bounds[::size].copy(), layout.device)
        folded[name] = JaggedColumn(column.values, layouts[layout.key])
        others[name + _SUFFIX] = layout.lengths.reshape(count, size)
    return count, folded, others


def unfold(columns: Mapping[str, Column], arrays: Mapping[str, np.ndarray], num_groups: int) -> _Folded:
    """Number of rows, columns and numpy columns; see `DataProto.unfold`."""
    sizes = {name: _column_size(name, column, arrays) for name, column in columns.items()}
    sizes |= {name: size for name, array in arrays.items() if (size := _array_size(name, array)) is not None}
    if len(set(sizes.values())) > 1:
        raise ValueError(f"expected columns folded into groups of one size, got {sizes}; pop those that are not")
    if not sizes and num_groups > 0:
        raise ValueError("expected a folded column, which would tell the size of the groups; the batch has none")
    size = next(iter(sizes.values()), 0)
    unfolded: dict[str, Column] = {}
    layouts: list[tuple[Layout, Layout]] = []
    for name, column in columns.items():
        if isinstance(column, JaggedColumn):
            layout = _layout_of_rows(column.layout, arrays[name + _SUFFIX], layouts)
            unfolded[name] = JaggedColumn(column.values, layout)
        else:
            unfolded[name] = column.flatten(0, 1)
    used = {name + _SUFFIX for name, column in columns.items() if isinstance(column, JaggedColumn)}
    others = {name: _unfold_array(array) for name, array in arrays.items() if name not in used}
    return num_groups * size, unfolded, others


def _layout_of_rows(folded: Layout, lengths: np.ndarray, known: list[tuple[Layout, Layout]]) -> Layout:
    """The layout of the rows within the groups; the same one for columns that shared it before they were folded."""
    bounds = Layout.of_lengths(lengths.reshape(-1), folded.device)
    for other_folded, other in known:
        if other_folded.key == folded.key and np.array_equal(other.bounds, bounds.bounds):
            return other
    known.append((folded, bounds))
    return bounds


def _column_size(name: str, column: Column, arrays: Mapping[str, np.ndarray]) -> int:
    if not isinstance(column, JaggedColumn):
        if column.dim() < 2:
            raise ValueError(f"column {name!r} {[*column.shape]} is not folded; repeat it for each row, or pop it")
        return column.shape[1]
    lengths = arrays.get(name + _SUFFIX)
    if lengths is None or lengths.ndim != 2 or not np.array_equal(lengths.sum(axis=1), column.layout.lengths):
        raise ValueError(
            f"expected the numpy column {name + _SUFFIX!r} with the row lengths of {name!r}, as fold() made it, got "
            f"{'none' if lengths is None else f'{lengths.dtype} {list(lengths.shape)}'}"
        )
    return lengths.shape[1]


def _array_size(name: str, array: np.ndarray) -> int | None:
    """None if an object column has no rows that could tell."""
    if array.dtype != object:
        if array.ndim < 2:
            raise ValueError(f"column {name!r} {list(array.shape)} is not folded; repeat it for each row, or pop it")
        return array.shape[1]
    sizes = {len(group) if isinstance(group, list) else -1 for group in array}
    if -1 in sizes or len(sizes) > 1:
        raise ValueError(f"column {name!r} is not folded: expected lists of one length; repeat its rows, or pop it")
    return next(iter(sizes), None)


def _fold_array(array: np.ndarray, count: int, size: int) -> np.ndarray:
    if array.dtype != object:
        return array.reshape(count, size, *array.shape[1:])
    return object_column([list(array[at * size : (at + 1) * size]) for at in range(count)])


def _unfold_array(array: np.ndarray) -> np.ndarray:
    if array.dtype != object:
        return array.reshape(array.shape[0] * array.shape[1], *array.shape[2:])
    return object_column([item for group in array for item in group])
