"""Making ragged columns and taking them apart."""

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
    """Whether `tensor` is a jagged nested tensor."""
    return tensor.is_nested and tensor.layout == torch.jagged


def ragged(
    values: Tensor, lengths: Tensor | Sequence[int] | None = None, *, offsets: Tensor | Sequence[int] | None = None
) -> Tensor:
    """Makes a ragged column `[B, j, ...]` from flat values and either the lengths or the offsets of its rows.

    Args:
        values: `[N, ...]`, any dtype and device; not copied.
        lengths: int `[B]`, adding up to N.
        offsets: int `[B + 1]`, from 0 to N, never falling. Columns given the same int64 tensor on the device of
            `values` share one layout.

    Raises:
        TypeError: neither or both of lengths and offsets, or they are not integers, or `values` is no tensor.
        ValueError: they do not describe the N rows of `values`.
    """
    if (lengths is None) == (offsets is None):
        raise TypeError("ragged() needs exactly one of lengths [B] and offsets [B + 1]")
    _check_tensor(values, "values")
    if values.is_nested or values.dim() == 0:
        raise ValueError(f"expected flat values [N, ...], got {describe(values)}; pass ragged.values(column)")
    given = torch.as_tensor(offsets if lengths is None else lengths)
    if given.numel() > 0 and (given.is_floating_point() or given.is_complex() or given.dtype == torch.bool):
        raise TypeError(f"expected integers as lengths or offsets, got {given.dtype}")
    if given.dim() != 1 or (lengths is None and given.numel() == 0):
        raise ValueError(f"expected lengths [B] or offsets [B + 1], got shape {list(given.shape)}")
    layout = _layout(given.long(), values.device, is_offsets=lengths is None)
    if not layout.fits(values.shape[0]):
        raise ValueError(
            f"expected {'lengths adding up to' if offsets is None else 'offsets rising from 0 to'} the "
            f"{values.shape[0]} rows of values, got {_brief(given)}"
        )
    return make_jagged(values, layout.offsets)


def ragged_from_list(rows: Sequence[Tensor]) -> Tensor:
    """Makes a ragged column of the rows, each `[length, ...]`, equal in dtype, device and trailing shape.

    Raises:
        ValueError: the list is empty (its dtype is unknown; use `ragged(torch.empty(0, dtype=...), [])`), or a row
            differs from row 0; the error names the row.
        TypeError: a row is no tensor.
    """
    if len(rows) == 0:
        raise ValueError("expected at least one row; make a column of zero rows with ragged(torch.empty(0), [])")
    first = rows[0]
    for number, row in enumerate(rows):
        _check_tensor(row, f"row {number}")
        if row.dim() == 0 or row.is_nested:
            raise ValueError(f"row {number}: expected a tensor [length, ...], got {describe(row)}")
        if (row.shape[1:], row.dtype, row.device) != (first.shape[1:], first.dtype, first.device):
            raise ValueError(f"row {number} is {describe(row)}, which does not go with row 0, {describe(first)}")
    return ragged(torch.cat(list(rows)), [row.shape[0] for row in rows])


def values(column: Tensor) -> Tensor:
    """The flat values `[N, ...]` of all rows, without a copy."""
    _check_column(column)
    return column.values()


def offsets(column: Tensor) -> Tensor:
    """Where each row starts in the values, and their end: int64 `[B + 1]`, on the device of the values."""
    _check_column(column)
    return column.offsets()  # pyright: ignore[reportAttributeAccessIssue]


def lengths(column: Tensor) -> Tensor:
    """The row lengths, int64 `[B]`, on the device of the values."""
    return offsets(column).diff()


def host_lengths(column: Tensor) -> Tensor:
    """The row lengths, int64 `[B]`, on the CPU, without waiting for the device of the values."""
    return torch.from_numpy(Layout.of_offsets(offsets(column)).lengths)


def like(values: Tensor, column: Tensor) -> Tensor:
    """Gives flat `values` `[N, ...]`, of any dtype, the row layout of `column`; the two columns share their offsets."""
    bounds = offsets(column)
    flat = column.values()
    if values.is_nested or values.dim() == 0 or values.shape[0] != flat.shape[0]:
        raise ValueError(f"expected flat values [{flat.shape[0]}, ...] for the column, got {describe(values)}")
    if values.device != flat.device:
        raise ValueError(f"expected values on {flat.device}, where the column is, got {values.device}")
    return make_jagged(values, bounds)


def open_column(column: Tensor) -> JaggedColumn:
    """A ragged column as values and layout. ValueError for another tensor."""
    bounds = offsets(column)
    return JaggedColumn(column.values(), Layout.of_offsets(bounds), column)


def describe(tensor: Tensor) -> str:
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
        raise TypeError(f"{what}: expected a tensor, got {type(value).__name__}; make it one with torch.tensor()")


def _check_column(column: Tensor) -> None:
    _check_tensor(column, "column")
    if not is_ragged(column):
        raise ValueError(f"expected a ragged column [B, j, ...], got {describe(column)}; see ragged.from_padded")
    if column.lengths() is not None or column._ragged_idx != 1:  # pyright: ignore[reportAttributeAccessIssue]
        raise ValueError(
            "expected a ragged column with dim 1 ragged and without gaps between rows; call column.transpose(1, 2) if "
            "dim 2 is ragged, or ragged.ragged_from_list(list(column.unbind())) to remove gaps"
        )


def _brief(numbers: Tensor) -> str:
    listed = numbers.tolist()
    return str(listed) if len(listed) <= 8 else f"{str(listed[:8])[:-1]}, ...] ({len(listed)} numbers)"
