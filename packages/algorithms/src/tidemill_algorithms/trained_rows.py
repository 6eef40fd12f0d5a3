"""The trained tokens of a batch as small padded float64 arrays."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from tidemill_dataproto import ragged

__all__ = ["TrainedRows", "count_trained", "discounted_sums"]

_CHUNK_ELEMENTS = 1 << 16  # half a MiB of float64, so that a chunk stays in the cache of a core


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainedRows:
    """The trained tokens of b consecutive rows, without the masked tokens between them, padded on the right: [b, T].

    Tokens that are not trained, such as the observations of a multi-turn response, do not exist in this view: the token
    after a trained token is the next trained one, and values at masked tokens have no effect.

    Attributes:
        rows: the rows in the batch.
        tokens: their tokens in the flat values of a ragged column.
        lengths: int64 [b], trained tokens of each row.
        trained: index of the trained ones in `tokens`.
        elements: index of the elements that are not padding in the flattened [b, T].
        num_tokens: tokens of all rows of the batch.
    """

    rows: slice
    tokens: slice
    lengths: np.ndarray
    trained: slice | np.ndarray
    elements: slice | np.ndarray
    num_tokens: int

    @classmethod
    def of(cls, response_mask: torch.Tensor) -> Iterator["TrainedRows"]:
        """Yield all rows of a ragged mask [B, j], in chunks that fit into a cache."""
        mask, offsets = ragged.values(response_mask).bool().numpy(), ragged.offsets(response_mask).numpy()
        lengths = count_trained(response_mask).numpy()
        for rows in _chunks(lengths.tolist()):
            tokens, counts = slice(int(offsets[rows.start]), int(offsets[rows.stop])), lengths[rows]
            is_element = np.arange(counts.max(initial=0)) < counts[:, None]
            yield cls(
                rows=rows,
                tokens=tokens,
                lengths=counts,
                trained=_index(mask[tokens]),
                elements=_index(is_element.reshape(-1)),
                num_tokens=len(mask),
            )

    def read(self, column: torch.Tensor) -> np.ndarray:
        """Return a ragged column [B, j] at the trained tokens, float64 [b, T], 0 in the padding.

        Raises:
            ValueError: the column has more or fewer values than `response_mask`.
        """
        values = ragged.values(column)
        if len(values) != self.num_tokens:
            raise ValueError(
                f"expected columns with one value for each of the {self.num_tokens} tokens of response_mask, got one "
                f"with {len(values)} values"
            )
        padded = np.zeros((len(self.lengths), self.lengths.max(initial=0)))
        padded.reshape(-1)[self.elements] = values[self.tokens].detach().double().numpy()[self.trained]
        return padded

    def outcome(self, rewards: torch.Tensor) -> np.ndarray:
        """Return rewards of the rows of the batch, [B], at their last trained token, float64 [b, T]."""
        padded = np.zeros((len(self.lengths), self.lengths.max(initial=0)))
        has_tokens = np.flatnonzero(self.lengths)
        padded[has_tokens, self.lengths[has_tokens] - 1] = rewards.double().numpy()[self.rows][has_tokens]
        return padded

    def write(self, padded: np.ndarray, out: np.ndarray) -> None:
        """Write [b, T] to the trained tokens of flat values `out` [N]."""
        out[self.tokens][self.trained] = padded.reshape(-1)[self.elements]


def count_trained(response_mask: torch.Tensor) -> torch.Tensor:
    """Return the number of trained tokens of each row of a ragged mask [B, j], int64 [B]."""
    mask, offsets = ragged.values(response_mask).bool().numpy(), ragged.offsets(response_mask).tolist()
    # a loop over rows is ten times as fast as a sum over segments, which first converts the mask
    counts = [np.count_nonzero(mask[start:stop]) for start, stop in pairwise(offsets)]
    return torch.tensor(counts, dtype=torch.int64)


def discounted_sums(values: np.ndarray, discount: float | np.ndarray) -> np.ndarray:
    """Return y with y[t] = values[t] + discount * y[t + 1], float64 [b, T].

    Sums of 1, 2, 4, ... neighbours, doubled until they cover the row.

    Args:
        values: float64 [b, T], 0 in the padding on the right.
        discount: one for all rows, or [b, 1].
    """
    sums, factor, reach = values.copy(), discount, 1
    while reach < values.shape[1]:
        sums[:, :-reach] += factor * sums[:, reach:]
        factor, reach = factor * factor, 2 * reach
    return sums


def _index(is_wanted: np.ndarray) -> slice | np.ndarray:
    return slice(None) if is_wanted.all() else np.flatnonzero(is_wanted)


def _chunks(lengths: Sequence[int]) -> Iterator[slice]:
    start, width = 0, 0
    for row, length in enumerate(lengths):
        widened = max(width, length)
        if row > start and (row + 1 - start) * widened > _CHUNK_ELEMENTS:
            yield slice(start, row)
            start, widened = row, length
        width = widened
    if lengths:
        yield slice(start, len(lengths))
