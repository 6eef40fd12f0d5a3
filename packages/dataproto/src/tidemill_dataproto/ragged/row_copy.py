"""Copy selected rows of ragged columns."""

import numpy as np
import torch
from torch import Tensor

from tidemill_dataproto.ragged.layout import JaggedColumn, Layout

__all__ = ["RowCopy"]

_MIN_MEAN_LENGTH = 256  # shorter rows consist mostly of ends


class RowCopy:
    """Copies the rows `rows` (int64 `[M]`, each in 0..B-1) of columns of one layout.

    Copying element by element needs an index as long as the values, and creating it takes as long as copying several
    columns. On the CPU, long rows are copied in blocks, and then the elements at both ends of each row.
    """

    def __init__(self, source: Layout, rows: np.ndarray) -> None:
        self.layout = Layout.of_lengths(source.lengths[rows], source.device)
        self._shift = source.starts[rows] - self.layout.starts  # source index minus result index, per row
        self._num_source = source.num_elements
        self._mean_length = self.layout.num_elements // max(self.layout.num_rows, 1)
        # A trade-off: large blocks leave more elements at the ends, small ones cost about a dozen elements each.
        self._block = 1 << (self._mean_length.bit_length() // 2 + 2)
        self._index: Tensor | None = None
        self._blocks: tuple[Tensor, Tensor, Tensor] | None = None

    def apply(self, column: JaggedColumn) -> JaggedColumn:
        """Copy the rows of a column; all results of one RowCopy share a layout."""
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
        # A view whose row i is the block that starts at element i; these rows overlap.
        runs = values.as_strided((values.shape[0] - self._block + 1, self._block), (1, 1))
        torch.index_select(runs, 0, starts, out=out[: starts.shape[0] * self._block].view(-1, self._block))
        return out.index_copy_(0, rest, values.index_select(0, rest_sources))

    def _plan_blocks(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return the source of each block of the result, the elements outside of blocks, and their sources.

        A block belongs to the row of its middle element, so on average a quarter of a block at each row boundary is
        copied by element. Elements that a block reads before or after its row are overwritten.
        """
        begin, end, block = self.layout.bounds[:-1], self.layout.bounds[1:], self._block
        num_blocks = self.layout.num_elements // block
        first, last = (np.minimum((edge + block // 2 - 1) // block, num_blocks) for edge in (begin, end))
        # Sources stay within the values, also where a block begins before its row or ends after it.
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
    """Return the numbers begin[i], begin[i] + 1, ..., `count[i]` of them, for all i."""
    before = np.cumsum(count) - count
    return np.repeat(begin - before, count) + np.arange(int(count.sum()))
