"""numpy columns of a batch: objects, and numbers and strings outside of tensor operations."""

import copy
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from tidemill_dataproto.columns import checks

__all__ = ["as_array", "check_array", "cut", "fill", "join", "kind_of", "object_column", "take"]


def object_column(rows: Sequence[Any]) -> np.ndarray:
    """Make a numpy object column `[B]` of `rows`; lists of equal length stay lists."""
    return np.fromiter(rows, dtype=object, count=len(rows))


def as_array(name: str, column: Any) -> np.ndarray:
    """Convert an array, list or tuple to a numpy column; a list or 2-D object array to one object per row."""
    if isinstance(column, list | tuple):
        return object_column(column)
    if not isinstance(column, np.ndarray) or column.ndim == 0:
        raise TypeError(
            f"column {name!r}: expected a numpy array or list of rows, got {type(column).__name__}; convert it with "
            f"list()"
        )
    # numpy makes a 2-D object array of lists of equal length; convert it back to one list per row.
    return object_column(column.tolist()) if column.dtype == object and column.ndim > 1 else column


def check_array(name: Any, array: Any) -> None:
    """Raise TypeError or ValueError unless `array` is a numpy array `[B, ...]`, or `[B]` for objects."""
    if not isinstance(name, str):
        raise TypeError(f"expected a column name as a string, got {name!r}")
    if not isinstance(array, np.ndarray):
        raise TypeError(
            f"column {name!r}: expected a numpy array in non_tensor_batch, got {type(array).__name__}; "
            f"DataProto.from_dict converts lists"
        )
    if array.ndim == 0 or (array.dtype == object and array.ndim != 1):
        raise ValueError(
            f"column {name!r}: expected one object per row, got {array.dtype} {list(array.shape)}; "
            f"pass a list to DataProto.from_dict"
        )


def kind_of(array: np.ndarray) -> str:
    """Describe dtype and row shape, which must agree for columns to be concatenated; strings of any width agree."""
    dtype = {"O": "object", "U": "str", "S": "bytes"}.get(array.dtype.kind, str(array.dtype))
    return f"{dtype} [{', '.join(map(str, ['B', *array.shape[1:]]))}]"


def cut(columns: Mapping[str, np.ndarray], bounds: Sequence[int]) -> list[dict[str, np.ndarray]]:
    """Cut into the runs of rows between neighbouring `bounds`, as views of the columns."""
    return [{name: array[a:b] for name, array in columns.items()} for a, b in pairwise(bounds)]


def take(columns: Mapping[str, np.ndarray], rows: np.ndarray) -> dict[str, np.ndarray]:
    """Copy the rows."""
    return {name: array[rows] for name, array in columns.items()}


def join(parts: Sequence[Mapping[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """Concatenate the rows of parts that have the same columns, of the same kinds."""
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def fill(name: str, like: np.ndarray, num_rows: int, value: Any) -> np.ndarray:
    """Make a column of the kind of `like` filled with `value`, copied for each row if it holds objects.

    Raises:
        ValueError: the dtype cannot represent `value`.
    """
    if like.dtype == object:
        return object_column([copy.deepcopy(value) for _ in range(num_rows)])
    given = np.asarray(value)
    _check_fill(name, like.dtype, given)
    dtype = given.dtype if like.dtype.kind in "US" else like.dtype  # a str dtype wide enough for the value
    return np.full((num_rows, *like.shape[1:]), given, dtype=dtype)


def _check_fill(name: str, dtype: np.dtype, given: np.ndarray) -> None:
    """Raise ValueError unless a dtype of numbers or times can represent the values `given`."""
    if dtype.kind == "f":
        low, high = float(np.finfo(dtype).min), float(np.finfo(dtype).max)
    elif dtype.kind in "iu":
        low, high = np.iinfo(dtype).min, np.iinfo(dtype).max
    else:
        low, high = 0, 1
    if dtype.kind in "biuf":
        for number in given.ravel().tolist():
            checks.check_fits(name, number, dtype, low, high, is_float=dtype.kind == "f")
    elif dtype.kind in "Mm" and given.dtype.kind != dtype.kind:
        raise ValueError(f"column {name!r} is {dtype}, which cannot hold {given}; convert it to a numpy {dtype.name}")
