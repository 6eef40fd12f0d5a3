"""Mini-batches in an order determined by a seed, resumable at any position."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Generic, TypeVar

import numpy as np

__all__ = ["BatchIterator"]

_T = TypeVar("_T")


class BatchIterator(Iterator[_T], Generic[_T]):
    """Yields batches of rows, each row once per epoch.

    Args:
        take: makes a batch of rows.
        rows: int64 `[M]`, the rows to iterate over.
        size: rows per batch; the last batch of an epoch has the remaining rows.
        epochs: number of epochs.
        seed: seed of the order; None keeps the order of `rows`.
    """

    def __init__(
        self, take: Callable[[np.ndarray], _T], rows: np.ndarray, size: int, epochs: int, seed: int | None
    ) -> None:
        self._take = take
        self._rows = rows
        self._size = size
        self._epochs = epochs
        self._seed = seed
        self._position = 0
        self._order = (-1, rows)  # epoch, and its rows in order

    def __len__(self) -> int:
        """Return the number of batches of all epochs, independent of the position."""
        return self._epochs * self._batches_per_epoch()

    def __next__(self) -> _T:
        if self._position >= len(self):
            raise StopIteration
        epoch, number = divmod(self._position, self._batches_per_epoch())
        if self._order[0] != epoch:
            self._order = epoch, self._permuted(epoch)
        self._position += 1
        return self._take(self._order[1][number * self._size : (number + 1) * self._size])

    def state_dict(self) -> dict[str, Any]:
        """Return the position as plain data for `load_state_dict`."""
        return {
            "position": self._position,
            "seed": self._seed,
            "num_rows": len(self._rows),
            "mini_batch_size": self._size,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from the position and with the seed of `state`, which may come from another process.

        Raises:
            ValueError: `state` belongs to another number of rows or another batch size.
        """
        mine = self.state_dict()
        if state.keys() != mine.keys():
            raise ValueError(f"expected the result of state_dict() with keys {sorted(mine)}, got {sorted(state)}")
        for key in ("num_rows", "mini_batch_size"):
            if state[key] != mine[key]:
                raise ValueError(
                    f"expected a state with {key}={mine[key]}, got {state[key]}; make the iterator as before the "
                    f"restart"
                )
        self._position, self._seed = state["position"], state["seed"]
        self._order = (-1, self._rows)

    def _batches_per_epoch(self) -> int:
        return -(-len(self._rows) // self._size)

    def _permuted(self, epoch: int) -> np.ndarray:
        if self._seed is None:
            return self._rows
        return np.random.default_rng([self._seed, epoch]).permutation(self._rows)
