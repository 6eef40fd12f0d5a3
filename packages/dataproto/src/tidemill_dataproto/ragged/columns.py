"""Create ragged columns and read their parts."""

from collections.abc import Sequence

import torch
from torch import Tensor

from tidemill_dataproto.ragged.layout import JaggedColumn, Layout, make_jagged

__all__ = [
    "describe",
    "host_lengths",
    "is_ragged",
    "lengths",
    "like",
    "offsets",
    "open_column",
    "ragged",
    "ragged_from_list",
    "values",
]


def is_ragged(tensor: Tensor) -> bool:
    """Return whether `tensor` is a jagged nested tensor."""
    return tensor.is_nested and tensor.layout == torch.jagged


def ragged(
    values: Tensor, lengths: Tensor | Sequence[int] | None = None, *, offsets: Tensor | Sequence[int] | None = None
) -> Tensor:
    """Make a ragged column `[B, j, ...]` from flat values and either the lengths or the offsets of its rows.

    Args:
        values: `[N, ...]`, any dtype and device; not copied.
        lengths: int `[B]`, with sum N.
        offsets: int `[B + 1]`, from 0 to N, non-decreasing. Columns that are given the same int64 tensor on the device
            of `values` share one layout.

    Raises:
        TypeError: neither or both of lengths and offsets, not integers, or `values` is not a tensor.
        ValueError: lengths or offsets do not match the N rows of `values`.
    """
    if (lengths is None) == (offsets is None):
        raise TypeError("ragged() needs exactly one of lengths [B] and offsets [B + 1]")
    _check_tensor(values, "values")
    if values.is_nested or values.dim() == 0:
        raise ValueError(f"expected flat values [N, ...], got {describe(values)}; pass ragged.values(column)")
    given = torch.as_tensor(offsets if lengths is None else lengths)
    if given.numel() > 0 and (given.is_floating_point() or given.is_complex() or given.dtype == torch.bool):
        raise TypeError(f"expected lengths or offsets as integers, got {given.dtype}; convert them with .long()")
    if given.dim() != 1 or (lengths is None and given.numel() == 0):
        raise ValueError(f"expected lengths [B] or offsets [B + 1], got shape {list(given.shape)}")
    layout = _layout(given.long(), values.device, is_offsets=lengths is None)
    if not layout.fits(values.shape[0]):
        raise ValueError(
            f"expected {'lengths with sum' if offsets is None else 'non-decreasing offsets from 0 to'} "
            f"{values.shape[0]}, the rows of values, got {_brief(given)}"
        )
    return make_jagged(values, layout.offsets)


def ragged_from_list(rows: Sequence[Tensor]) -> Tensor:
    """Make a ragged column of rows, each `[length, ...]`, equal in dtype, device and trailing shape.

    Raises:
        ValueError: the list is empty (its dtype is unknown; use `ragged(torch.empty(0, dtype=...), [])`), or a row
            differs from row 0; the error names the row.
        TypeError: a row is not a tensor.
    """
    if len(rows) == 0:
        raise ValueError(
            "expected at least one row; use ragged(torch.empty(0, dtype=...), []) for a column of zero rows"
        )
    first = rows[0]
    for number, row in enumerate(rows):
        _check_tensor(row, f"row {number}")
        if row.dim() == 0 or row.is_nested:
            raise ValueError(f"row {number}: expected a tensor [length, ...], got {describe(row)}")
        if (row.shape[1:], row.dtype, row.device) != (first.shape[1:], first.dtype, first.device):
            raise ValueError(
                f"row {number} is {describe(row)}, which does not match row 0, {describe(first)}; convert or reshape it"
            )
    return ragged(torch.cat(list(rows)), [row.shape[0] for row in rows])


def values(column: Tensor) -> Tensor:
    """Return the flat values `[N, ...]` of all rows, without a copy."""
    _check_column(column)
    return column.values()


def offsets(column: Tensor) -> Tensor:
    """Return the start of each row in the values, and the end of the last: int64 `[B + 1]`, on their device."""
    _check_column(column)
    return column.offsets()  # pyright: ignore[reportAttributeAccessIssue]


def lengths(column: Tensor) -> Tensor:
    """Return the row lengths, int64 `[B]`, on the device of the values."""
    return offsets(column).diff()


def host_lengths(column: Tensor) -> Tensor:
    """Return the row lengths, int64 `[B]`, on the CPU, without waiting for the device of the values."""
    return torch.from_numpy(Layout.of_offsets(offsets(column)).lengths)


def like(values: Tensor, column: Tensor) -> Tensor:
    """Make a column of flat `values` `[N, ...]`, of any dtype, with the row layout of `column`, sharing its offsets.

    Raises:
        ValueError: another number of values, or another device.
    """
    bounds = offsets(column)
    flat = column.values()
    if values.is_nested or values.dim() == 0 or values.shape[0] != flat.shape[0]:
        raise ValueError(f"expected flat values [{flat.shape[0]}, ...] for the column, got {describe(values)}")
    if values.device != flat.device:
        raise ValueError(f"expected values on {flat.device}, the device of the column, got {values.device}; move them")
    return make_jagged(values, bounds)


def open_column(column: Tensor) -> JaggedColumn:
    """Return a ragged column as values and layout. ValueError for another tensor."""
    bounds = offsets(column)
    return JaggedColumn(column.values(), Layout.of_offsets(bounds), column)


def describe(tensor: Tensor) -> str:
    """Return dtype, shape and device as text for an error."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    if tensor.is_nested and tensor.layout != torch.jagged:  # has no shape
        return f"nested {dtype} of layout {tensor.layout} on {tensor.device}"
    return f"{'nested ' if tensor.is_nested else ''}{dtype} {[*tensor.shape]} on {tensor.device}"


def _layout(given: Tensor, device: torch.device, is_offsets: bool) -> Layout:
    if is_offsets and given.device == device:
        return Layout.of_offsets(given)
    host = given.cpu().numpy()
    return Layout(host, device) if is_offsets else Layout.of_lengths(host, device)


def _check_tensor(value: object, what: str) -> None:
    if not isinstance(value, Tensor):
        raise TypeError(f"{what}: expected a tensor, got {type(value).__name__}; convert it with torch.tensor()")


def _check_column(column: Tensor) -> None:
    _check_tensor(column, "column")
    if not is_ragged(column):
        raise ValueError(
            f"expected a ragged column [B, j, ...], got {describe(column)}; use ragged.from_padded() for a padded "
            f"tensor"
        )
    if column.lengths() is not None or column._ragged_idx != 1:  # pyright: ignore[reportAttributeAccessIssue]
        raise ValueError(
            "expected a ragged column with dim 1 ragged and without gaps between rows; call column.transpose(1, 2) if "
            "dim 2 is ragged, or ragged.ragged_from_list(list(column.unbind())) to remove gaps"
        )


def _brief(numbers: Tensor) -> str:
    listed = numbers.tolist()
    return str(listed) if len(listed) <= 8 else f"{str(listed[:8])[:-1]}, ...] ({len(listed)} numbers)"
