"""Copying chosen rows of ragged columns."""

import numpy as np
import torch
from torch import Tensor

from tidemill_dataproto.ragged.layout import JaggedColumn, Layout

__all__ = ["RowCopy"]

_MIN_MEAN_LENGTH = 256  # below, most of a block would be the ends of rows


class RowCopy:
    """Takes the rows `rows` (int64 `[M]`, each in 0..B-1) of columns of one layout.

    Copying element by element needs an index as long as the values, and making it takes as long as copying several
    columns. On the CPU, long rows are copied in blocks instead, and then the elements at the ends of rows.
    """

    def __init__(self, source: Layout, rows: np.ndarray) -> None:
        self.layout = Layout.of_lengths(source.lengths[rows], source.device)
        self._shift = source.starts[rows] - self.layout.starts  # from an element's place in the result to its source
        self._num_source = source.num_elements
        self._mean_length = self.layout.num_elements // max(self.layout.num_rows, 1)
        # Few elements at the ends of rows, and yet few blocks: copying a block takes as long as a dozen elements.
        self._block = 1 << (self._mean_length.bit_length() // 2 + 2)
        self._index: Tensor | None = None
        self._blocks: tuple[Tensor, Tensor, Tensor] | None = None

    def apply(self, column: JaggedColumn) -> JaggedColumn:
        """The rows of a column, copied; the columns that come out share one layout."""
        values = column.values
        in_blocks = (
            values.device.type == "cpu"
            and values.dim() == 1
            and values.is_contiguous()
            and not values.requires_grad
            and self._mean_length >= _MIN_MEAN_LENGTH
        )
        if in_blocks:
            return JaggedColumn(self._copy_blocks(values), self.layout)
        if self._index is None:
            self._index = self.layout.shifted(self._shift)
        return JaggedColumn(values.index_select(0, self._index), self.layout)

    def _copy_blocks(self, values: Tensor) -> Tensor:
        if self._blocks is None:
            self._blocks = self._plan_blocks()
        starts, rest, rest_sources = self._blocks
        out = values.new_empty(self.layout.num_elements)
        # Every run of a block's length as a row of a matrix, which overlap; blocks of several rows get any of them.
        runs = values.as_strided((values.shape[0] - self._block + 1, self._block), (1, 1))
        torch.index_select(runs, 0, starts, out=out[: starts.shape[0] * self._block].view(-1, self._block))
        return out.index_copy_(0, rest, values.index_select(0, rest_sources))

    def _plan_blocks(self) -> tuple[Tensor, Tensor, Tensor]:
        """Where each block of the result comes from, and the elements that blocks do not bring, with their sources.

        A block belongs to the row of its middle element, so that a border between rows leaves a quarter of a block to
        be copied by elements. What it reads before and after its row is overwritten by them.
        """
        begin, end, block = self.layout.bounds[:-1], self.layout.bounds[1:], self._block
        num_blocks = self.layout.num_elements // block
        first, last = (np.minimum((edge + block // 2 - 1) // block, num_blocks) for edge in (begin, end))
        # Sources must lie within the values, also where a block begins before its row or ends after it.
        first = np.maximum(first, -(self._shift // block))
        last = np.minimum(last, (self._num_source - self._shift) // block)
        count = np.maximum(last - first, 0)
        starts = np.zeros(num_blocks, dtype=np.int64)
        blocks = _runs(first, count)
        starts[blocks] = blocks * block + np.repeat(self._shift, count)
        inner_begin = np.where(count > 0, np.maximum(first * block, begin), end)
        inner_end = np.where(count > 0, np.minimum(last * block, end), end)
        sizes = np.concatenate([inner_begin - begin, end - inner_end])
        rest = _runs(np.concatenate([begin, inner_end]), sizes)
        sources = rest + np.repeat(np.concatenate([self._shift, self._shift]), sizes)
        return torch.from_numpy(starts), torch.from_numpy(rest), torch.from_numpy(sources)


def _runs(begin: np.ndarray, count: np.ndarray) -> np.ndarray:
    """The numbers begin[i], begin[i] + 1, ..., `count[i]` of them, for all i."""
    before = np.cumsum(count) - count
    return np.repeat(begin - before, count) + np.arange(int(count.sum()))
