"""Rows that are added so that a number of rows divides, and taken out again."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from tidemill_dataproto import arrays as numpy_half
from tidemill_dataproto import tensors as tensor_half
from tidemill_dataproto.proto import DataProto
from tidemill_dataproto.ragged.layout import JaggedColumn
from tidemill_dataproto.tensors import Column

__all__ = ["pad_dataproto_to_divisor", "unpad_dataproto"]


def pad_dataproto_to_divisor(
    data: DataProto,
    size_divisor: int,
    blank_keys: Sequence[str] = ("response_mask", "loss_mask"),
    group_keys: Sequence[str] = ("uid",),
) -> tuple[DataProto, int]:
    """Adds as few rows at the end as make the number of rows a multiple of `size_divisor`.

    A padding row is a copy of the row with the fewest ragged elements, so that every worker can compute it, and
    cheaply. But it is not trained: in the columns of `blank_keys`, as far as the batch has them, it is zero, or None
    for objects. And it belongs to no group of other rows: in those of `group_keys` it is None for objects, "" for
    strings, NaN for floats, and one more than all others for integers, which are read if they are on a device. It stays
    marked (`DataProto.is_padding`): iterating skips it, and `concat` drops it.

    Returns:
        The padded batch and the number of rows added.

    Raises:
        ValueError: size_divisor < 1, or integers of group_keys that leave no larger one to their dtype.
    """
    if size_divisor < 1:
        raise ValueError(f"expected a size_divisor of at least 1, got {size_divisor}")
    pad_size = -len(data) % size_divisor
    if pad_size == 0:
        return data.select(), 0
    columns = data._read()
    row = _cheapest_row(columns, ~data.is_padding)
    rows = np.concatenate([np.arange(len(data)), np.full(pad_size, row)])
    padded = data._take(rows)
    for key in blank_keys:
        _blank(padded, key, pad_size, _zero)
    for key in group_keys:
        _blank(padded, key, pad_size, _unused)
    padded._padding = np.concatenate([data.is_padding, np.ones(pad_size, dtype=bool)])
    return padded, pad_size


def unpad_dataproto(data: DataProto, pad_size: int) -> DataProto:
    """Takes out the `pad_size` rows that `pad_dataproto_to_divisor` added, also from what a worker made of them.

    A batch that knows its padding rows loses these, if it still has them. One that does not, because a worker built it
    anew, loses its last `pad_size` rows.

    Raises:
        ValueError: another number of rows is marked as padding, or the batch has fewer rows.
    """
    marked, end = data._num_padding(), len(data) - pad_size
    if pad_size < 0 or (end < 0 and (marked > 0 or data._padding is None)):
        raise ValueError(f"expected a pad_size of 0 to {len(data)}, the number of rows, got {pad_size}")
    if data._padding is None:
        return data[:end]
    if marked > pad_size and data._padding[end:].all():  # it was padded before, too
        return data[:end]
    if marked not in (0, pad_size):
        raise ValueError(f"expected {pad_size} padding rows, the batch has {marked}; pass what the padding returned")
    real = data.select() if marked == 0 else data._take(np.flatnonzero(~data._padding))
    real._padding = None
    return real


def _cheapest_row(columns: dict[str, Column], is_real: np.ndarray) -> int:
    """The first row that is not padding and has the fewest ragged elements."""
    cost = np.zeros(is_real.shape[0], dtype=np.int64)
    for column in columns.values():
        if isinstance(column, JaggedColumn):
            cost += column.layout.lengths
    real = np.flatnonzero(is_real)
    rows = real if real.size > 0 else np.arange(is_real.shape[0])
    return int(rows[cost[rows].argmin()])


def _blank(padded: DataProto, key: str, pad_size: int, number: Callable[[Tensor | np.ndarray], float]) -> None:
    """Blanks the last `pad_size` rows of a column that this batch has for itself, if it has it.

    Args:
        number: gives what stands there in a column of numbers.
    """
    columns, arrays = padded._read(), padded.non_tensor_batch
    start = len(padded) - pad_size
    if key in columns:
        column = columns[key]
        if isinstance(column, JaggedColumn):
            flat, start = column.values, int(column.layout.bounds[start])
        else:
            flat = column
        value = number(flat)
        tensor_half.check_fill(key, flat, value)
        flat[start:] = value
    elif key in arrays:
        array = arrays[key]
        blank: Any = None if array.dtype == object else array.dtype.type()
        if array.dtype.kind in "biuf":
            blank = number(array)
        arrays[key] = np.concatenate([array[:start], numpy_half.fill(key, array, pad_size, blank)])


def _zero(_: Tensor | np.ndarray) -> float:
    return 0


def _unused(column: Tensor | np.ndarray) -> float:
    """A number that is none of the column's: NaN, which equals none, or one more than all integers."""
    numbers = column.flatten().tolist()
    return math.nan if any(isinstance(number, float) for number in numbers) else max(numbers, default=0) + 1
