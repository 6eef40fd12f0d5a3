"""One row of a batch."""

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from torch import Tensor

from tidemill_dataproto.layout import JaggedColumn
from tidemill_dataproto.tensors import Column

__all__ = ["DataProtoItem"]


@dataclass(frozen=True, slots=True, eq=False)
class DataProtoItem:
    """One row of a batch, as `batch[i]` returns it.

    Attributes:
        batch: its tensors by column: `[...]` of a dense column, `[length, ...]` of a ragged one; views of the batch.
        non_tensor_batch: its objects and numbers by column.
        meta_info: a deep copy of the batch's.
    """

    batch: dict[str, Tensor]
    non_tensor_batch: dict[str, Any]
    meta_info: dict[str, Any]

    @classmethod
    def of_row(
        cls, columns: Mapping[str, Column], arrays: Mapping[str, np.ndarray], meta_info: Mapping[str, Any], row: int
    ) -> Self:
        """Row 0..B-1 of columns that belong together."""
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
