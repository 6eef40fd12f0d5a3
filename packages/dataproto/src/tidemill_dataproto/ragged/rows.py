"""Join, split, select and shift rows of ragged columns."""

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from tidemill_dataproto.ragged.columns import describe, is_ragged, open_column
from tidemill_dataproto.ragged.index import as_counts, as_row_index
from tidemill_dataproto.ragged.layout import JaggedColumn, Layout
from tidemill_dataproto.ragged.row_copy import RowCopy

__all__ = ["concat_rows", "index_rows", "response_predictions", "split_rows"]


def concat_rows(a: Tensor, b: Tensor) -> Tensor:
    """Concatenate row i of `a` `[B, j1, ...]` and row i of `b` `[B, j2, ...]`, for all i: `[B, j1 + j2, ...]`.

    Raises:
        ValueError: the columns differ in number of rows, dtype, device or trailing shape.
    """
    first, second = open_column(a), open_column(b)
    flat_a, flat_b = first.values, second.values
    if first.layout.num_rows != second.layout.num_rows:
        raise ValueError(
            f"expected columns with the same number of rows, got {first.layout.num_rows} and {second.layout.num_rows}"
        )
    if (flat_a.shape[1:], flat_a.dtype, flat_a.device) != (flat_b.shape[1:], flat_b.dtype, flat_b.device):
        raise ValueError(
            f"expected columns of the same dtype, device and trailing shape, got {describe(a)} and {describe(b)}"
        )
    bounds_a, bounds_b = first.layout.bounds, second.layout.bounds
    # An element of `a` moves right by the elements of `b` in earlier rows; one of `b` by those of `a` up to its own
    # row.
    index_a, index_b = first.layout.shifted(bounds_b[:-1]), second.layout.shifted(bounds_a[1:])
    out = flat_a.new_empty(flat_a.shape[0] + flat_b.shape[0], *flat_a.shape[1:])
    out = out.index_copy(0, index_a, flat_a).index_copy_(0, index_b, flat_b)
    return JaggedColumn(out, Layout(bounds_a + bounds_b, flat_a.device)).tensor


def split_rows(column: Tensor, lengths: Tensor | Sequence[int]) -> tuple[Tensor, Tensor]:
    """Split each row after its first `lengths[i]` elements; the inverse of `concat_rows`.

    Args:
        column: ragged `[B, j, ...]`.
        lengths: int `[B]`, at most the length of each row; or a ragged column, for its row lengths.

    Raises:
        ValueError: a row is shorter than its entry in lengths; the error names it.
    """
    whole = open_column(column)
    given = open_column(lengths).layout.lengths if isinstance(lengths, Tensor) and is_ragged(lengths) else lengths
    head = as_counts(given, whole.layout.num_rows, "lengths")
    tail = whole.layout.lengths - head
    if tail.size > 0 and tail.min() < 0:
        row = int(tail.argmin())
        raise ValueError(
            f"row {row} has {whole.layout.lengths[row]} elements, got lengths[{row}]={head[row]}; lower it"
        )
    starts, device = whole.layout.starts, whole.layout.device
    first = _run_of(whole, starts, Layout.of_lengths(head, device))
    return first, _run_of(whole, starts + head, Layout.of_lengths(tail, device))


def index_rows(column: Tensor, index: Tensor | Sequence[int]) -> Tensor:
    """Select the rows `index` (int `[M]`, or bool `[B]`) of a column `[B, j, ...]`, as `[M, j, ...]`.

    Raises:
        IndexError, TypeError, ValueError: as for the rows of a DataProto.
    """
    whole = open_column(column)
    rows = as_row_index(index, whole.layout.num_rows)
    return RowCopy(whole.layout, rows).apply(whole).tensor


def response_predictions(per_token: Tensor, responses: Tensor) -> Tensor:
    """Return the model outputs that predict each response token.

    The output of a language model at a token is about the next token. For rows of a prompt and its response, this
    returns the outputs from the last prompt token to the second to last response token: log-probabilities of the next
    token become those of the response tokens.

    Args:
        per_token: ragged `[B, prompt + response, ...]`, one output for each token.
        responses: ragged `[B, response]`; the result shares its layout.

    Raises:
        ValueError: a row has a response but no prompt token before it; or the columns differ in rows or devices.
    """
    outputs, wanted = open_column(per_token), open_column(responses)
    if outputs.layout.num_rows != wanted.layout.num_rows or outputs.layout.device != wanted.layout.device:
        raise ValueError(
            f"expected columns with the same number of rows on one device, got {describe(per_token)} and "
            f"{describe(responses)}"
        )
    lacking = (wanted.layout.lengths > 0) & (outputs.layout.lengths <= wanted.layout.lengths)
    if lacking.any():
        row = int(lacking.argmax())
        raise ValueError(
            f"row {row} has {outputs.layout.lengths[row]} tokens and a response of {wanted.layout.lengths[row]}; "
            f"expected at least one prompt token before the response"
        )
    ends = outputs.layout.bounds[1:]
    return _run_of(outputs, ends - wanted.layout.lengths - 1, wanted.layout)


def _run_of(whole: JaggedColumn, starts: np.ndarray, layout: Layout) -> Tensor:
    """Return a column of `layout` whose row i is the run of values of `whole` from `starts[i]` on."""
    index = layout.shifted(starts - layout.starts)
    return JaggedColumn(whole.values.index_select(0, index), layout).tensor
