"""Convert between ragged columns and padded tensors."""

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from tidemill_dataproto.ragged.columns import describe, open_column
from tidemill_dataproto.ragged.index import as_counts
from tidemill_dataproto.ragged.layout import JaggedColumn, Layout

__all__ = ["from_padded", "from_prompt_response", "to_padded", "to_prompt_response"]


def to_padded(
    column: Tensor, pad_value: float | int | bool, *, side: str = "right", max_len: int | None = None
) -> Tensor:
    """Pad a column `[B, j, ...]` to a dense tensor `[B, T, ...]`.

    Args:
        column: the ragged column.
        pad_value: value of the padding.
        side: "right" or "left", the side of the padding.
        max_len: T; the longest row if None.

    Raises:
        ValueError: a row is longer than max_len (rows are never cut), the dtype cannot represent pad_value, or an
            unknown side.
    """
    whole = open_column(column)
    layout, flat = whole.layout, whole.values
    if not _represents(flat.dtype, pad_value):
        raise ValueError(f"pad_value must be a value of {flat.dtype}, the dtype of the column; got {pad_value}")
    longest = int(layout.lengths.max(initial=0))
    width = longest if max_len is None else max_len
    if longest > width:
        row = int(layout.lengths.argmax())
        raise ValueError(
            f"row {row} has {longest} elements, more than max_len={width}; truncate the rows or raise max_len"
        )
    index = layout.shifted(_starts_in_padded(layout, width, side) - layout.starts)
    out = flat.new_full((layout.num_rows * width, *flat.shape[1:]), pad_value)
    return out.index_copy(0, index, flat).reshape(layout.num_rows, width, *flat.shape[1:])


def _represents(dtype: torch.dtype, value: float | int | bool) -> bool:
    if dtype.is_floating_point:  # which may round it
        return not torch.finfo(dtype).max < abs(value) < math.inf
    try:
        return torch.full((), value, dtype=dtype).item() == value
    except RuntimeError:  # overflow
        return False


def from_padded(
    tensor: Tensor, mask: Tensor | None = None, *, lengths: Tensor | Sequence[int] | None = None, side: str = "right"
) -> Tensor:
    """Make a padded tensor ragged; the inverse of `to_padded`.

    Args:
        tensor: `[B, T, ...]`.
        mask: `[B, T]`: elements where it is true (or 1) are kept, in order, wherever the padding is. A mask on CUDA is
            read, which waits for the device.
        lengths: instead of a mask, the number of elements of each row, int `[B]`.
        side: "right" or "left", the side of the padding, if `lengths` are given.

    Raises:
        TypeError: neither or both of mask and lengths.
        ValueError: mask or lengths do not match the tensor.
    """
    if (mask is None) == (lengths is None):
        raise TypeError("from_padded() needs exactly one of mask [B, T] and lengths [B]")
    if mask is not None:
        if tensor.is_nested or mask.is_nested or mask.dim() != 2 or tensor.shape[:2] != mask.shape:
            raise ValueError(f"expected tensor [B, T, ...] and mask [B, T], got {describe(tensor)}, {describe(mask)}")
        keep = mask.bool()
        layout = Layout.of_lengths(keep.sum(dim=1).cpu().numpy(), tensor.device)
        return JaggedColumn(tensor[keep], layout).tensor
    if tensor.is_nested or tensor.dim() < 2:
        raise ValueError(f"expected a tensor [B, T, ...], got {describe(tensor)}")
    num_rows, width = tensor.shape[:2]
    counts = as_counts(lengths, num_rows, "lengths")
    if counts.max(initial=0) > width:
        row = int(counts.argmax())
        raise ValueError(
            f"expected lengths of at most {width}, the width of the tensor, got {counts[row]} for row {row}"
        )
    layout = Layout.of_lengths(counts, tensor.device)
    index = layout.shifted(_starts_in_padded(layout, width, side) - layout.starts)
    return JaggedColumn(tensor.flatten(0, 1).index_select(0, index), layout).tensor


def to_prompt_response(
    prompts: Tensor,
    responses: Tensor,
    pad_value: float | int | bool,
    *,
    max_prompt_len: int | None = None,
    max_response_len: int | None = None,
) -> Tensor:
    """Pad prompts on the left and responses on the right: `[B, P + R]`, all responses start in column P.

    P and R are the lengths of the longest prompt and response if None. Raises as `to_padded`.
    """
    left = to_padded(prompts, pad_value, side="left", max_len=max_prompt_len)
    return torch.cat([left, to_padded(responses, pad_value, max_len=max_response_len)], dim=1)


def from_prompt_response(tensor: Tensor, mask: Tensor, prompt_width: int) -> tuple[Tensor, Tensor]:
    """Split `tensor` `[B, P + R, ...]` after column `prompt_width` (P) and make both parts ragged.

    The inverse of `to_prompt_response` for the mask `[B, P + R]` of tokens that are not padding. Raises as
    `from_padded`.
    """
    if not 0 <= prompt_width <= mask.shape[-1]:
        raise ValueError(f"expected a prompt_width of 0 to {mask.shape[-1]}, the width of the mask, got {prompt_width}")
    prompts = from_padded(tensor[:, :prompt_width], mask[:, :prompt_width])
    return prompts, from_padded(tensor[:, prompt_width:], mask[:, prompt_width:])


def _starts_in_padded(layout: Layout, width: int, side: str) -> np.ndarray:
    """Return the start of each row in the flattened padded tensor, int64 `[B]`."""
    if side not in ("right", "left"):
        raise ValueError(f'expected side "right" or "left", got {side!r}')
    starts = np.arange(layout.num_rows) * width
    return starts if side == "right" else starts + width - layout.lengths
