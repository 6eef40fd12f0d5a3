"""Copy tables: a plan and the places of the shards, flattened to rows for one kernel launch. Pure, numpy only."""

from dataclasses import dataclass, fields

import numpy as np
import torch
from numpy.typing import NDArray

from tidemill_weight_update.box import Box


@dataclass(frozen=True, slots=True)
class Shard:
    """A box of a global tensor and where its values lie.

    Element `i` of the global tensor, with `i` in `box`, is element `offset + sum((i_d - box.start[d]) * strides[d])` of
    memory block `memory`; offset and strides in elements of the sent dtype.
    """

    box: Box
    memory: int
    offset: int
    strides: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class CopyTable:
    """Two-dimensional copies, one per entry of the columns. All counts are in elements.

    Attributes:
        tensor: index of the source tensor, for digests.
        memory, src, src_pitch: index of the memory block, first element, elements between rows.
        target, dst, dst_pitch: index of the parameter, first element, elements between rows.
        rows, cols: a row is contiguous in the source, in the parameter and in the global tensor.
        pos, pos_pitch: position of the first element in the flattened global tensor, and between rows.
        src_dtype, dst_dtype: the sent dtype and the parameter's, of all copies in the table.
    """

    src_dtype: torch.dtype
    dst_dtype: torch.dtype
    tensor: NDArray[np.int32]
    memory: NDArray[np.int32]
    src: NDArray[np.int64]
    src_pitch: NDArray[np.int64]
    target: NDArray[np.int32]
    dst: NDArray[np.int64]
    dst_pitch: NDArray[np.int64]
    rows: NDArray[np.int64]
    cols: NDArray[np.int64]
    pos: NDArray[np.int64]
    pos_pitch: NDArray[np.int64]

    def __post_init__(self) -> None:
        lengths = {name: len(getattr(self, name)) for name in COLUMNS}
        if len(set(lengths.values())) != 1:
            raise ValueError(f"the columns of a table must have the same length, got {lengths}")

    def __len__(self) -> int:
        return len(self.tensor)

    @property
    def num_elements(self) -> int:
        """Elements that the table copies."""
        return int((self.rows * self.cols).sum())


COLUMNS = tuple(item.name for item in fields(CopyTable) if not item.name.endswith("dtype"))
"""The names of a table's columns."""
