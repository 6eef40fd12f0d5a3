"""Single rows: one row of a batch as an item, and a batch from items."""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from tidemill_dataproto import ragged
from tidemill_dataproto.columns.checks import pick
from tidemill_dataproto.columns.equality import same
from tidemill_dataproto.columns.tensor_columns import Column
from tidemill_dataproto.ragged.layout import JaggedColumn

__all__ = ["DataProtoItem", "columns_of_items"]

_Tensors = dict[str, Tensor]
_Others = dict[str, Any]


@dataclass(frozen=True, slots=True, eq=False)
class DataProtoItem:
    """One row of a batch, as returned by `batch[i]`.

    Attributes:
        batch: tensors by column: `[...]` of a dense column, `[length, ...]` of a ragged one; views of the batch.
        non_tensor_batch: objects and numbers by column.
        meta_info: a deep copy of the batch's meta_info.
    """

    batch: dict[str, Tensor]
    non_tensor_batch: dict[str, Any]
    meta_info: dict[str, Any]

    @classmethod
    def of_row(
        cls, columns: Mapping[str, Column], arrays: Mapping[str, np.ndarray], meta_info: Mapping[str, Any], row: int
    ) -> Self:
        """Make the item of row 0..B-1 of consistent columns."""
        return cls(
            {name: _row_of(column, row) for name, column in columns.items()},
            {name: array[row] for name, array in arrays.items()},
            copy.deepcopy(dict(meta_info)),
        )


def _row_of(column: Column, row: int) -> Tensor:
    if not isinstance(column, JaggedColumn):
        return column[row]
    start, stop = column.layout.bounds[row : row + 2].tolist()
    return column.values[start:stop]


def columns_of_items(
    items: Sequence[DataProtoItem | Mapping[str, Any]], dense: Sequence[str]
) -> tuple[_Tensors, _Others, dict[str, Any]]:
    """Return tensor columns, other columns and meta_info of items; see `DataProto.from_items`."""
    if len(items) == 0:
        raise ValueError("expected at least one item; use from_dict() for a batch of zero rows")
    rows = [{**item.batch, **item.non_tensor_batch} if isinstance(item, DataProtoItem) else item for item in items]
    metas = [item.meta_info for item in items if isinstance(item, DataProtoItem)]
    for number, row in enumerate(rows):
        if row.keys() != rows[0].keys():
            raise ValueError(
                f"expected the columns {list(rows[0])} of item 0, got {list(row)} in item {number}; add or drop columns"
            )
    for meta in metas:
        if not same(meta, metas[0]):
            raise ValueError(
                f"expected items with the same meta_info, got {metas[0]} and {meta}; pass dicts of rows instead of "
                f"items"
            )
    pick(rows[0], dense, "column")
    tensors: _Tensors = {}
    others: _Others = {}
    for name in rows[0]:
        column = [row[name] for row in rows]
        are_tensors = [isinstance(value, Tensor) for value in column]
        if any(are_tensors) and not all(are_tensors):
            other = are_tensors.index(False)
            raise ValueError(
                f"column {name!r}: expected tensors in all items or none, but item {other} has no tensor; convert it"
            )
        if all(are_tensors):
            tensors[name] = _column_of(name, column, name in dense)
        else:
            others[name] = column
    return tensors, others, metas[0] if metas else {}


def _column_of(name: str, rows: list[Tensor], is_dense: bool) -> Tensor:
    first = rows[0]
    if not is_dense and first.dim() > 0:
        try:
            return ragged.ragged_from_list(rows)
        except ValueError as error:
            raise ValueError(f"column {name!r}: {error}") from error
    for number, row in enumerate(rows):
        if (row.shape, row.dtype, row.device) != (first.shape, first.dtype, first.device):
            raise ValueError(
                f"column {name!r}: item {number} is {row.dtype} {[*row.shape]} on {row.device}, which does not match "
                f"item 0, {first.dtype} {[*first.shape]} on {first.device}; drop it from `dense` for a ragged column"
            )
    return torch.stack(rows)
