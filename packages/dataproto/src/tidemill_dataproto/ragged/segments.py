"""Reduce elements to one value per row, and expand row values to elements."""

import torch
from torch import Tensor

from tidemill_dataproto.ragged.columns import describe, open_column

__all__ = ["expand_rows", "segment_mean", "segment_sum"]


def expand_rows(per_row: Tensor, column: Tensor) -> Tensor:
    """Repeat the value of each row, `per_row` `[B, ...]`, for each element of the row: flat `[N, ...]`.

    Raises:
        ValueError: not one value per row.
    """
    layout = open_column(column).layout
    if per_row.is_nested or per_row.dim() == 0 or per_row.shape[0] != layout.num_rows:
        raise ValueError(f"expected one value per row, [{layout.num_rows}, ...], got {describe(per_row)}")
    return per_row.index_select(0, layout.rows())


def segment_sum(flat: Tensor, column: Tensor) -> Tensor:
    """Sum `flat` `[N, ...]` within each row of `column`: `[B, ...]`; 0 for an empty row.

    Floats are summed in float64, and returned in their dtype, smaller ones in float32; integers and bool as int64. The
    result is deterministic, on CUDA too.

    Raises:
        ValueError: not one value per element.
    """
    layout = open_column(column).layout
    if flat.is_nested or flat.dim() == 0 or flat.shape[0] != layout.num_elements:
        raise ValueError(f"expected flat values [{layout.num_elements}, ...], got {describe(flat)}")
    if not flat.is_floating_point():
        zeros = flat.new_zeros(layout.num_rows, *flat.shape[1:], dtype=torch.int64)
        return zeros.index_add(0, layout.rows(), flat.long())
    dtype = torch.promote_types(flat.dtype, torch.float32)
    # torch's own check fails on zero rows; layouts are checked when a column is made, so `unsafe` is safe here.
    # On the CPU it adds one element after the other, so long rows would lose digits in float32.
    return torch.segment_reduce(flat.double(), "sum", lengths=layout.offsets.diff(), unsafe=True).to(dtype)


def segment_mean(flat: Tensor, column: Tensor) -> Tensor:
    """Average `flat` `[N, ...]` within each row of `column`: `[B, ...]`; 0 for an empty row.

    Dtypes as in `segment_sum`, but float32 for integers. Raises as `segment_sum`.
    """
    total = segment_sum(flat if flat.is_floating_point() else flat.float(), column)
    counts = open_column(column).layout.offsets.diff().clamp(min=1).to(total.dtype)
    return total / counts.reshape(-1, *[1] * (total.dim() - 1))
