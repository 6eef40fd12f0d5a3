"""Ragged columns: rows of different lengths as one flat tensor of values and the offsets of its rows.

A ragged column is a jagged nested tensor of torch whose ragged dim is dim 1, `[B, j]` or `[B, j, ...]`: `values` is
`[N, ...]` with the rows one after another, `offsets` is int64 `[B + 1]` from 0 to N, and row i is
`values[offsets[i]:offsets[i + 1]]`. Functions here are index arithmetic on these two; none loops over rows. Zero rows,
one row, rows of equal length and empty rows are ordinary. Gradients flow through all functions of values.

torch lets two ragged columns meet in one operation (`a + b`) only where both hold the same `offsets` object. `like`
keeps it, and so do the row operations of DataProto for columns that shared it before.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = [
    "concat_rows",
    "expand_rows",
    "from_padded",
    "index_rows",
    "is_ragged",
    "lengths",
    "like",
    "offsets",
    "ragged",
    "ragged_from_list",
    "segment_mean",
    "segment_sum",
    "to_padded",
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
        values: `[N, ...]`, any dtype; not copied.
        lengths: int `[B]`, adding up to N.
        offsets: int `[B + 1]`, from 0 to N, never falling. Columns given the same int64 tensor on the device of
            `values` share one layout.

    Raises:
        TypeError: neither or both of lengths and offsets, or they are not integers.
        ValueError: they do not describe the N rows of `values`.
    """
    if (lengths is None) == (offsets is None):
        raise TypeError("ragged() needs exactly one of lengths [B] and offsets [B + 1]")
    if values.is_nested or values.dim() == 0:
        raise ValueError(f"expected flat values [N, ...], got {_describe(values)}; pass ragged.values(column)")
    given = _int64(offsets if lengths is None else lengths, values.device)
    if given.dim() != 1 or (lengths is None and given.numel() == 0):
        raise ValueError(f"expected lengths [B] or offsets [B + 1], got shape {list(given.shape)}")
    bounds = given if lengths is None else _offsets_of(given)
    if bounds[0] != 0 or bounds[-1] != values.shape[0] or (bounds.diff() < 0).any():
        raise ValueError(
            f"expected {'lengths adding up to' if offsets is None else 'offsets rising from 0 to'} the "
            f"{values.shape[0]} rows of values, got {_brief(given)}"
        )
    return unchecked(values, bounds)


def ragged_from_list(rows: Sequence[Tensor]) -> Tensor:
    """Makes a ragged column of the rows, each `[length, ...]`, equal in dtype, device and trailing shape.

    Raises:
        ValueError: the list is empty (its dtype is unknown; use `ragged(torch.empty(0, dtype=...), [])`), or a row
            differs from row 0; the error names the row.
    """
    if len(rows) == 0:
        raise ValueError("expected at least one row; make a column of zero rows with ragged(torch.empty(0), [])")
    first = rows[0]
    for number, row in enumerate(rows):
        if row.dim() == 0 or row.is_nested:
            raise ValueError(f"row {number}: expected a tensor [length, ...], got {_describe(row)}")
        if (row.shape[1:], row.dtype, row.device) != (first.shape[1:], first.dtype, first.device):
            raise ValueError(f"row {number} is {_describe(row)}, which does not go with row 0, {_describe(first)}")
    return ragged(torch.cat(list(rows)), [row.shape[0] for row in rows])


def values(column: Tensor) -> Tensor:
    """The flat values `[N, ...]` of all rows, without a copy."""
    _check_column(column)
    return column.values()


def offsets(column: Tensor) -> Tensor:
    """Where each row starts in the values, and their end: int64 `[B + 1]`."""
    _check_column(column)
    return column.offsets()  # pyright: ignore[reportAttributeAccessIssue]


def lengths(column: Tensor) -> Tensor:
    """The row lengths, int64 `[B]`."""
    return offsets(column).diff()


def like(values: Tensor, column: Tensor) -> Tensor:
    """Gives flat `values` `[N, ...]`, of any dtype, the row layout of `column`; the two columns share their offsets."""
    bounds = offsets(column)
    flat = column.values()
    if values.is_nested or values.dim() == 0 or values.shape[0] != flat.shape[0]:
        raise ValueError(f"expected flat values [{flat.shape[0]}, ...] for the column, got {_describe(values)}")
    if values.device != flat.device:
        raise ValueError(f"expected values on {flat.device}, where the column is, got {values.device}")
    return unchecked(values, bounds)


def concat_rows(a: Tensor, b: Tensor) -> Tensor:
    """Concatenates row i of `a` `[B, j1, ...]` and of `b` `[B, j2, ...]` to row i of the result `[B, j1 + j2, ...]`.

    Raises:
        ValueError: the columns differ in number of rows, dtype, device or trailing shape.
    """
    bounds_a, bounds_b, flat_a, flat_b = offsets(a), offsets(b), a.values(), b.values()
    if bounds_a.shape != bounds_b.shape:
        raise ValueError(f"expected columns of equally many rows, got {len(bounds_a) - 1} and {len(bounds_b) - 1}")
    if (flat_a.shape[1:], flat_a.dtype, flat_a.device) != (flat_b.shape[1:], flat_b.dtype, flat_b.device):
        raise ValueError(f"expected columns of one kind, got {_describe(a)} and {_describe(b)}")
    # Element n of `a` moves right by all of `b` in earlier rows; of `b`, by all of `a` up to and with its own row.
    index_a = torch.arange(flat_a.shape[0], device=flat_a.device) + _expand(bounds_b[:-1], bounds_a, flat_a.shape[0])
    index_b = torch.arange(flat_b.shape[0], device=flat_b.device) + _expand(bounds_a[1:], bounds_b, flat_b.shape[0])
    out = flat_a.new_empty(flat_a.shape[0] + flat_b.shape[0], *flat_a.shape[1:])
    out = out.index_copy(0, index_a, flat_a).index_copy_(0, index_b, flat_b)
    return unchecked(out, bounds_a + bounds_b)


def to_padded(
    column: Tensor, pad_value: float | int | bool, *, side: str = "right", max_len: int | None = None
) -> Tensor:
    """Pads a column `[B, j, ...]` to a dense tensor `[B, T, ...]`.

    Args:
        column: the ragged column.
        pad_value: fills the rest of each row.
        side: "right" or "left", where the padding goes.
        max_len: T; the longest row where None.

    Raises:
        ValueError: a row is longer than max_len (nothing is cut), or another side.
    """
    if side not in ("right", "left"):
        raise ValueError(f'expected side "right" or "left", got {side!r}')
    bounds, flat = offsets(column), column.values()
    counts = bounds.diff()
    num_rows = counts.shape[0]
    longest = int(counts.max()) if num_rows > 0 else 0
    width = longest if max_len is None else max_len
    if longest > width:
        row = int(counts.argmax())
        raise ValueError(f"row {row} has {longest} elements, more than max_len={width}; cut the rows or raise max_len")
    starts = torch.arange(num_rows, device=flat.device) * width - bounds[:-1]
    if side == "left":
        starts = starts + (width - counts)
    index = torch.arange(flat.shape[0], device=flat.device) + _expand(starts, bounds, flat.shape[0])
    out = flat.new_full((num_rows * width, *flat.shape[1:]), pad_value)
    return out.index_copy(0, index, flat).reshape(num_rows, width, *flat.shape[1:])


def from_padded(tensor: Tensor, mask: Tensor) -> Tensor:
    """Keeps the elements of `tensor` `[B, T, ...]` where `mask` `[B, T]` is true (or 1), in order, as a ragged column.

    The inverse of `to_padded` for the mask of real elements, on whichever side the padding is.
    """
    if tensor.is_nested or mask.is_nested or mask.dim() != 2 or tensor.shape[:2] != mask.shape:
        raise ValueError(f"expected tensor [B, T, ...] and mask [B, T], got {_describe(tensor)} and {_describe(mask)}")
    keep = mask.bool()
    return unchecked(tensor[keep], _offsets_of(keep.sum(dim=1)))


def index_rows(column: Tensor, index: Tensor) -> Tensor:
    """Takes the rows `index` (int `[M]`, each in 0..B-1) of a column `[B, j, ...]`, as `[M, j, ...]`."""
    plan, bounds = index_plan(offsets(column), index)
    return unchecked(column.values().index_select(0, plan), bounds)


def index_plan(bounds: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
    """Where the elements of the rows `index` lie in a column with offsets `bounds`.

    Returns the flat index, int64 `[N]`, and the offsets of the rows taken. Columns of one layout can share both.
    `index` is on the device of `bounds`.
    """
    starts, counts = bounds[:-1].index_select(0, index), bounds.diff().index_select(0, index)
    new_bounds = _offsets_of(counts)
    size = int(new_bounds[-1])
    plan = torch.arange(size, device=bounds.device) + _expand(starts - new_bounds[:-1], new_bounds, size)
    return plan, new_bounds


def expand_rows(per_row: Tensor, column: Tensor) -> Tensor:
    """Repeats the value of each row, `per_row` `[B, ...]`, for each element of the row: flat `[N, ...]`."""
    bounds = offsets(column)
    if per_row.is_nested or per_row.dim() == 0 or per_row.shape[0] != bounds.shape[0] - 1:
        raise ValueError(f"expected one value per row, [{bounds.shape[0] - 1}, ...], got {_describe(per_row)}")
    return _expand(per_row, bounds, column.values().shape[0])


def segment_sum(flat: Tensor, column: Tensor) -> Tensor:
    """Adds up `flat` `[N, ...]` within each row of `column`: `[B, ...]`; 0 for an empty row.

    float32 and float64 keep their dtype, smaller floats are added in and returned as float32, integers and bool as
    int64. The result does not change from run to run, on CUDA either.
    """
    bounds = offsets(column)
    if flat.is_nested or flat.dim() == 0 or flat.shape[0] != column.values().shape[0]:
        raise ValueError(f"expected flat values [{column.values().shape[0]}, ...], got {_describe(flat)}")
    if not flat.is_floating_point():
        rows = _expand(torch.arange(bounds.shape[0] - 1, device=bounds.device), bounds, flat.shape[0])
        return flat.new_zeros(bounds.shape[0] - 1, *flat.shape[1:], dtype=torch.int64).index_add(0, rows, flat.long())
    if flat.dtype.itemsize < 4:
        flat = flat.float()
    # The check that `unsafe` leaves out fails on zero rows; offsets are checked where a column is made.
    return torch.segment_reduce(flat, "sum", lengths=bounds.diff(), unsafe=True)


def segment_mean(flat: Tensor, column: Tensor) -> Tensor:
    """The mean of `flat` `[N, ...]` over each row of `column`: `[B, ...]`, dtypes as in `segment_sum`, but float32 for
    integers; 0 for an empty row."""
    total = segment_sum(flat if flat.is_floating_point() else flat.float(), column)
    counts = lengths(column).clamp(min=1).to(total.dtype)
    return total / counts.reshape(-1, *[1] * (total.dim() - 1))


def unchecked(flat: Tensor, bounds: Tensor) -> Tensor:
    """`ragged(flat, offsets=bounds)` for parts that are known to fit each other."""
    if torch.is_inference_mode_enabled() and not flat.is_inference():  # torch cannot make this view in inference mode
        with torch.inference_mode(False), torch.no_grad():
            return torch.nested.nested_tensor_from_jagged(flat, bounds)
    return torch.nested.nested_tensor_from_jagged(flat, bounds)


def _offsets_of(counts: Tensor) -> Tensor:
    return torch.cat([counts.new_zeros(1), counts.cumsum(0)])


def _expand(per_row: Tensor, bounds: Tensor, size: int) -> Tensor:
    return per_row.repeat_interleave(bounds.diff(), dim=0, output_size=size)


def _int64(numbers: Tensor | Sequence[int] | None, device: torch.device) -> Tensor:
    tensor = torch.as_tensor(numbers)
    if tensor.numel() > 0 and (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool):
        raise TypeError(f"expected integers as lengths or offsets, got {tensor.dtype}")
    return tensor.to(device=device, dtype=torch.int64)


def _check_column(column: Tensor) -> None:
    if not is_ragged(column):
        raise ValueError(f"expected a ragged column [B, j, ...], got {_describe(column)}; see ragged.from_padded")
    if column.lengths() is not None or column._ragged_idx != 1:  # pyright: ignore[reportAttributeAccessIssue]
        raise ValueError(
            "expected a ragged column with dim 1 ragged and without gaps between rows; make one with "
            "ragged.ragged(values, lengths) or ragged.ragged_from_list(list(column.unbind()))"
        )


def _describe(tensor: Tensor) -> str:
    dtype = str(tensor.dtype).removeprefix("torch.")
    if tensor.is_nested and tensor.layout != torch.jagged:  # has no shape
        return f"nested {dtype} of layout {tensor.layout} on {tensor.device}"
    return f"{'nested ' if tensor.is_nested else ''}{dtype} {[*tensor.shape]} on {tensor.device}"


def _brief(numbers: Tensor) -> str:
    listed = numbers.tolist()
    return str(listed) if len(listed) <= 8 else f"{str(listed[:8])[:-1]}, ...] ({len(listed)} numbers)"
