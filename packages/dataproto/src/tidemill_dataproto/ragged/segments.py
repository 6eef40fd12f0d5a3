"""Between one value per row and one value per element."""

import torch
from torch import Tensor

from tidemill_dataproto.ragged.columns import describe, open_column

__all__ = ["expand_rows", "segment_mean", "segment_sum"]


def expand_rows(per_row: Tensor, column: Tensor) -> Tensor:
    """Repeats the value of each row, `per_row` `[B, ...]`, for each element of the row: flat `[N, ...]`."""
    layout = open_column(column).layout
    if per_row.is_nested or per_row.dim() == 0 or per_row.shape[0] != layout.num_rows:
        raise ValueError(f"expected one value per row, [{layout.num_rows}, ...], got {describe(per_row)}")
    return per_row.index_select(0, layout.rows())


def segment_sum(flat: Tensor, column: Tensor) -> Tensor:
    """Adds up `flat` `[N, ...]` within each row of `column`: `[B, ...]`; 0 for an empty row.

    float32 and float64 keep their dtype, smaller floats are added in and returned as float32, integers and bool as
    int64. The result does not change from run to run, on CUDA either.
    """
    layout = open_column(column).layout
    if flat.is_nested or flat.dim() == 0 or flat.shape[0] != layout.num_elements:
        raise ValueError(f"expected flat values [{layout.num_elements}, ...], got {describe(flat)}")
    if not flat.is_floating_point():
        zeros = flat.new_zeros(layout.num_rows, *flat.shape[1:], dtype=torch.int64)
        return zeros.index_add(0, layout.rows(), flat.long())
    if flat.dtype.itemsize < 4:
        flat = flat.float()
    # The check that `unsafe` leaves out fails on zero rows; layouts are checked where a column is made.
    return torch.segment_reduce(flat, "sum", lengths=layout.offsets.diff(), unsafe=True)


def segment_mean(flat: Tensor, column: Tensor) -> Tensor:
    """The mean of `flat` `[N, ...]` over each row of `column`: `[B, ...]`, dtypes as in `segment_sum`, but float32 for
    integers; 0 for an empty row."""
    total = segment_sum(flat if flat.is_floating_point() else flat.float(), column)
    counts = open_column(column).layout.offsets.diff().clamp(min=1).to(total.dtype)
    return total / counts.reshape(-1, *[1] * (total.dim() - 1))
