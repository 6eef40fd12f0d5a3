"""Groups of neighbouring rows as one row, and rows split into several."""

from collections.abc import Mapping, Sequence

import numpy as np

from tidemill_dataproto.columns.numpy_columns import object_column
from tidemill_dataproto.columns.tensor_columns import Column
from tidemill_dataproto.ragged.layout import JaggedColumn, Layout

__all__ = ["fold", "split_rows", "unfold"]

_Folded = tuple[int, dict[str, Column], dict[str, np.ndarray]]
_SUFFIX = ".lengths"


def fold(columns: Mapping[str, Column], arrays: Mapping[str, np.ndarray], num_rows: int, size: int) -> _Folded:
    """Return number of groups, tensor columns and numpy columns; see `DataProto.fold`."""
    if size < 1 or num_rows % size != 0:
        raise ValueError(
            f"{num_rows} rows do not divide into groups of {size}; choose another group_size or pad the batch"
        )
    count = num_rows // size
    folded: dict[str, Column] = {}
    others = {name: _fold_array(array, count, size) for name, array in arrays.items()}
    layouts: dict[int, Layout] = {}
    for name, column in columns.items():
        if not isinstance(column, JaggedColumn):
            folded[name] = column.unflatten(0, (count, size))
            continue
        if name + _SUFFIX in columns or name + _SUFFIX in arrays:
            raise ValueError(
                f"the name {name + _SUFFIX!r} is reserved for the row lengths of {name!r}; rename that column"
            )
        layout = column.layout
        if layout.key not in layouts:
            layouts[layout.key] = Layout(layout.bounds[::size].copy(), layout.device)
        folded[name] = JaggedColumn(column.values, layouts[layout.key])
        others[name + _SUFFIX] = layout.lengths.reshape(count, size)
    return count, folded, others


def unfold(columns: Mapping[str, Column], arrays: Mapping[str, np.ndarray], num_groups: int) -> _Folded:
    """Return number of rows, tensor columns and numpy columns; see `DataProto.unfold`."""
    sizes = {name: _column_size(name, column, arrays) for name, column in columns.items()}
    sizes |= {name: size for name, array in arrays.items() if (size := _array_size(name, array)) is not None}
    if len(set(sizes.values())) > 1:
        raise ValueError(
            f"expected columns folded into groups of one size, got {sizes}; pop columns that are not folded"
        )
    if not sizes and num_groups > 0:
        raise ValueError("expected at least one folded column, which determines the group size; the batch has none")
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
    """Return the layout of the rows within the groups; the same object for columns that shared it before `fold`."""
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
    """Return the group size; None if an object column has no rows to determine it."""
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


def split_rows(
    columns: Mapping[str, Column], arrays: Mapping[str, np.ndarray], size: int, names: Sequence[str]
) -> tuple[dict[str, Column], dict[str, np.ndarray]]:
    """Cut each row of the columns `names` into `size` rows of equal length; see `DataProto.unfold_column_chunks`."""
    layouts: dict[int, Layout] = {}
    split: dict[str, Column] = {}
    for name in names:
        if name not in columns:
            continue
        column = columns[name]
        if isinstance(column, JaggedColumn):
            layout = column.layout
            if layout.key not in layouts:
                _check_divides(name, layout.lengths, size)
                layouts[layout.key] = Layout.of_lengths(np.repeat(layout.lengths // size, size), layout.device)
            split[name] = JaggedColumn(column.values, layouts[layout.key])
        else:
            width = _check_width(name, tuple(column.shape), size)
            split[name] = column.reshape(column.shape[0] * size, width, *column.shape[2:])
    others = {name: _split_array(name, arrays[name], size) for name in names if name in arrays}
    return split, others


def _split_array(name: str, array: np.ndarray, size: int) -> np.ndarray:
    if array.dtype != object:
        width = _check_width(name, array.shape, size)
        return array.reshape(array.shape[0] * size, width, *array.shape[2:])
    for row, value in enumerate(array):
        if not isinstance(value, list):
            raise ValueError(f"column {name!r}: expected a list in row {row} to split, got {type(value).__name__}")
    _check_divides(name, np.array([len(value) for value in array], dtype=np.int64), size)
    runs = [value[at * len(value) // size : (at + 1) * len(value) // size] for value in array for at in range(size)]
    return object_column(runs)


def _check_width(name: str, shape: tuple[int, ...], size: int) -> int:
    if len(shape) < 2 or shape[1] % size != 0:
        raise ValueError(
            f"column {name!r} {list(shape)} does not divide along dim 1 into {size} parts; leave it out of split_keys"
        )
    return shape[1] // size


def _check_divides(name: str, lengths: np.ndarray, size: int) -> None:
    rest = np.flatnonzero(lengths % size)
    if rest.size > 0:
        row = int(rest[0])
        raise ValueError(
            f"column {name!r}: row {row} has {lengths[row]} elements, which do not divide into {size} parts; leave the "
            f"column out of split_keys"
        )
