"""Padding of a batch to a divisible number of rows."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from tidemill_dataproto.columns import numpy_columns, tensor_columns
from tidemill_dataproto.columns.tensor_columns import Column
from tidemill_dataproto.proto import DataProto
from tidemill_dataproto.ragged.layout import JaggedColumn

__all__ = ["pad_dataproto_to_divisor", "unpad_dataproto"]


def pad_dataproto_to_divisor(
    data: DataProto,
    size_divisor: int,
    blank_keys: Sequence[str] = ("response_mask", "loss_mask"),
    group_keys: Sequence[str] = ("uid", "episode"),
) -> tuple[DataProto, int]:
    """Append padding rows until the number of rows is a multiple of `size_divisor`.

    A padding row is a copy of the row with the fewest ragged elements, so that workers can process it at low cost. It
    does
    not affect training: in the columns of `blank_keys` that the batch has, it is zero, or None for objects. It is in no
    group of other rows: in the columns of `group_keys` it is None for objects, "" for strings, NaN for floats, and for
        integers one more than the maximum (integers on a device are read). It is marked in `DataProto.is_padding`:
        iteration skips it, and `concat` drops it.

    Args:
        data: the batch.
        size_divisor: divisor of the number of rows.
        blank_keys: names of columns that are zero in padding rows.
        group_keys: names of columns that identify groups of rows.

    Returns:
        The padded batch and the number of appended rows.

    Raises:
        ValueError: size_divisor < 1, or a column of group_keys at the maximum of its integer dtype.
    """
    if size_divisor < 1:
        raise ValueError(f"expected size_divisor >= 1, got {size_divisor}")
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
    """Remove the `pad_size` rows that `pad_dataproto_to_divisor` appended, also from the result of a worker.

    If padding rows are marked, these are removed, if they are still present. If none are marked, because a worker made
    a new batch, the last `pad_size` rows are removed.

    Raises:
        ValueError: another number of rows is marked as padding, or the batch has fewer rows.
    """
    marked, end = data._num_padding(), len(data) - pad_size
    if pad_size < 0 or (end < 0 and (marked > 0 or data._padding is None)):
        raise ValueError(f"expected pad_size from 0 to {len(data)}, the number of rows, got {pad_size}")
    if data._padding is None:
        return data[:end]
    if marked > pad_size and data._padding[end:].all():  # padding of a batch that was padded before
        return data[:end]
    if marked not in (0, pad_size):
        raise ValueError(
            f"expected {pad_size} padding rows, got a batch with {marked}; pass the number that "
            f"pad_dataproto_to_divisor returned"
        )
    real = data.select() if marked == 0 else data._take(np.flatnonzero(~data._padding))
    real._padding = None
    return real


def _cheapest_row(columns: dict[str, Column], is_real: np.ndarray) -> int:
    """Return the first row that is not padding and has the fewest ragged elements."""
    cost = np.zeros(is_real.shape[0], dtype=np.int64)
    for column in columns.values():
        if isinstance(column, JaggedColumn):
            cost += column.layout.lengths
    real = np.flatnonzero(is_real)
    rows = real if real.size > 0 else np.arange(is_real.shape[0])
    return int(rows[cost[rows].argmin()])


def _blank(padded: DataProto, key: str, pad_size: int, number: Callable[[Tensor | np.ndarray], float]) -> None:
    """Overwrite the last `pad_size` rows of a column that no other batch shares, if the column exists.

    Args:
        number: returns the new value for a column of numbers.
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
        tensor_columns.check_fill(key, flat, value)
        flat[start:] = value
    elif key in arrays:
        array = arrays[key]
        blank: Any = None if array.dtype == object else array.dtype.type()
        if array.dtype.kind in "biuf":
            blank = number(array)
        arrays[key] = np.concatenate([array[:start], numpy_columns.fill(key, array, pad_size, blank)])


def _zero(_: Tensor | np.ndarray) -> float:
    return 0


def _unused(column: Tensor | np.ndarray) -> float:
    """Return a number that is not in the column: NaN for floats, else one more than the maximum."""
    numbers = column.flatten().tolist()
    return math.nan if any(isinstance(number, float) for number in numbers) else max(numbers, default=0) + 1
