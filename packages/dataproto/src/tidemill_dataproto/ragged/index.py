"""Row indices and counts of users, as checked numpy arrays on the host."""

from typing import Any

import numpy as np
from torch import Tensor

__all__ = ["as_counts", "as_row_index"]


def as_row_index(index: Any, num_rows: int) -> np.ndarray:
    """Convert a list, mask, tensor or array of rows to int64 `[M]`, each in 0..num_rows-1.

    An index on a device is copied to the host, which waits for the device.

    Raises:
        TypeError: not integers or bools, or uint8, which is ambiguous.
        ValueError: not one-dimensional, or a mask of another length than num_rows.
        IndexError: a row outside -num_rows..num_rows-1.
    """
    if not isinstance(index, Tensor | np.ndarray | list | tuple | range):
        raise TypeError(
            f"expected rows as a list, mask, tensor or array, got {type(index).__name__}; use batch[row] for one row"
        )
    rows = _host_numbers(index)
    if rows.size > 0 and rows.dtype.kind not in "iub":
        raise TypeError(f"expected rows as integers or a bool mask, got {rows.dtype}; use select() for columns")
    if rows.dtype == np.uint8:  # numpy reads uint8 as row numbers
        raise TypeError(
            "expected rows as integers or a bool mask, got uint8, which torch reads as a mask; pass .bool() or .long()"
        )
    if rows.ndim != 1:
        raise ValueError(f"expected rows with one dim, got shape {list(rows.shape)}; flatten them")
    if rows.dtype == bool:
        if rows.shape[0] != num_rows:
            raise ValueError(
                f"expected a mask of {num_rows} rows, got {rows.shape[0]}; make it from a column of this batch"
            )
        return rows.nonzero()[0]
    if rows.size == 0:
        return np.zeros(0, dtype=np.int64)
    low, high = int(rows.min()), int(rows.max())
    if low < -num_rows or high >= num_rows:
        raise IndexError(f"row {low if low < -num_rows else high} is out of range for a batch of {num_rows} rows")
    rows = rows.astype(np.int64)
    return np.where(rows < 0, rows + num_rows, rows) if low < 0 else rows


def as_counts(counts: Any, num_rows: int, what: str) -> np.ndarray:
    """Convert one number >= 0 per row (list, tensor or array) to int64 `[B]`. TypeError or ValueError otherwise."""
    numbers = _host_numbers(counts)
    if numbers.size > 0 and numbers.dtype.kind not in "iu":
        raise TypeError(f"expected {what} as integers, got {numbers.dtype}; round or convert them")
    if numbers.shape != (num_rows,):
        raise ValueError(f"expected {what} as one number per row, [{num_rows}], got shape {list(numbers.shape)}")
    numbers = numbers.astype(np.int64)
    if numbers.size > 0 and numbers.min() < 0:
        row = int(numbers.argmin())
        raise ValueError(f"expected {what} >= 0, got {numbers[row]} for row {row}")
    return numbers


def _host_numbers(numbers: Any) -> np.ndarray:
    if not isinstance(numbers, Tensor):
        return np.asarray(numbers)
    host = numbers.detach().cpu()
    if host.is_floating_point():  # numpy lacks bfloat16
        host = host.float()
    return host.numpy()
