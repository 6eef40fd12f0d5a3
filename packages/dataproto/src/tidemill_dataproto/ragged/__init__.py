"""Ragged columns: rows of different lengths as one flat tensor of values and the offsets of its rows.

A ragged column is a jagged nested tensor of torch with dim 1 ragged, `[B, j]` or `[B, j, ...]`: `values` is `[N, ...]`
with the rows one after another, `offsets` is int64 `[B + 1]` from 0 to N, and row i is `values[offsets[i]:offsets[i +
1]]`. The functions here are index arithmetic on these two tensors; none loops over rows. Zero rows, one row, rows of
equal length and empty rows are supported everywhere. Gradients flow through all functions of values.

torch accepts two ragged columns in one operation (`a + b`) only if both have the same `offsets` object. `like` keeps
it, and so do the row operations of DataProto for columns that shared it before.

Row lengths are known on the host, so nothing here waits for a CUDA device, unless lengths, offsets, a mask or an index
are on that device: these are read once, as are the offsets of a nested tensor that torch itself created.
"""

from tidemill_dataproto.ragged.columns import (
    host_lengths,
    is_ragged,
    lengths,
    like,
    offsets,
    ragged,
    ragged_from_list,
    values,
)
from tidemill_dataproto.ragged.padded import from_padded, from_prompt_response, to_padded, to_prompt_response
from tidemill_dataproto.ragged.rows import concat_rows, index_rows, response_predictions, split_rows
from tidemill_dataproto.ragged.segments import expand_rows, segment_mean, segment_sum

__all__ = [
    "concat_rows",
    "expand_rows",
    "from_padded",
    "from_prompt_response",
    "host_lengths",
    "index_rows",
    "is_ragged",
    "lengths",
    "like",
    "offsets",
    "ragged",
    "ragged_from_list",
    "response_predictions",
    "segment_mean",
    "segment_sum",
    "split_rows",
    "to_padded",
    "to_prompt_response",
    "values",
]
