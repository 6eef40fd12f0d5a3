"""The numpy half of a batch: object columns, and numbers and strings that no tensor operation needs."""

import copy
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from tidemill_dataproto import checks

__all__ = ["as_array", "check_array", "cut", "fill", "join", "kind_of", "object_column", "take"]


def object_column(rows: Sequence[Any]) -> np.ndarray:
    """A numpy object column `[B]` that holds `rows` as they are: lists of equal length stay lists."""
    return np.fromiter(rows, dtype=object, count=len(rows))


def as_array(name: str, column: Any) -> np.ndarray:
    """A numpy column of an array, list or tuple. Lists and 2-D object arrays give one object per row."""
    if isinstance(column, list | tuple):
        return object_column(column)
    if not isinstance(column, np.ndarray) or column.ndim == 0:
        raise TypeError(f"column {name!r}: expected a numpy array or list of rows, got {type(column).__name__}")
    # numpy makes a 2-D object array of lists that happen to be equally long; back to one list per row.
    return object_column(column.tolist()) if column.dtype == object and column.ndim > 1 else column


def check_array(name: Any, array: Any) -> None:
    """Raises TypeError or ValueError unless `array` is a numpy array `[B, ...]`, or `[B]` if it holds objects."""
    if not isinstance(name, str):
        raise TypeError(f"expected a column name as a string, got {name!r}")
    if not isinstance(array, np.ndarray):
        raise TypeError(
            f"column {name!r}: expected a numpy array in non_tensor_batch, got {type(array).__name__}; "
            f"DataProto.from_dict makes one of a list"
        )
    if array.ndim == 0 or (array.dtype == object and array.ndim != 1):
        raise ValueError(
            f"column {name!r}: expected one object per row, got {array.dtype} {list(array.shape)}; "
            f"pass a list to DataProto.from_dict"
        )


def kind_of(array: np.ndarray) -> str:
    """What must agree for columns to be joined; strings of different widths go together."""
    dtype = {"O": "object", "U": "str", "S": "bytes"}.get(array.dtype.kind, str(array.dtype))
    return f"{dtype} [{', '.join(map(str, ['B', *array.shape[1:]]))}]"


def cut(columns: Mapping[str, np.ndarray], bounds: Sequence[int]) -> list[dict[str, np.ndarray]]:
    """Cuts into the runs of rows between neighbouring `bounds`, as views of the columns."""
    return [{name: array[a:b] for name, array in columns.items()} for a, b in pairwise(bounds)]


def take(columns: Mapping[str, np.ndarray], rows: np.ndarray) -> dict[str, np.ndarray]:
    """Copies the rows."""
    return {name: array[rows] for name, array in columns.items()}


def join(parts: Sequence[Mapping[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """Concatenates the rows of parts that have the same columns, of the same kinds."""
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def fill(name: str, like: np.ndarray, num_rows: int, value: Any) -> np.ndarray:
    """A column of the kind of `like`, all of whose rows are `value`, copied for each row if they are objects.

    Raises:
        ValueError: `value` is nothing that a column of numbers or times can hold.
    """
    if like.dtype == object:
        return object_column([copy.deepcopy(value) for _ in range(num_rows)])
    given = np.asarray(value)
    _check_fill(name, like.dtype, given)
    dtype = given.dtype if like.dtype.kind in "US" else like.dtype  # strings have room for the value
    return np.full((num_rows, *like.shape[1:]), given, dtype=dtype)


def _check_fill(name: str, dtype: np.dtype, given: np.ndarray) -> None:
    """Raises ValueError unless a column of numbers or times can hold the values `given`."""
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
        raise ValueError(f"column {name!r} is {dtype}, which cannot hold {given}; make it a numpy {dtype.name}")
