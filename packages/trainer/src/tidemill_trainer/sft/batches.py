"""The batches of supervised fine-tuning."""

import numpy as np
import torch
from tidemill_dataproto import DataProto

from tidemill_trainer.data import shuffled_rows


class Batches:
    """Draw batches in an order that is different in each epoch.

    The batch of a step is a function of seed and step, so there is no state to save. A batch may continue into the next
    epoch, so only the last batch of the last epoch can be smaller than the others.

    Args:
        dataset: rows; those of one example are next to each other.
        batch_size: examples per step.
        seed: seed of the order.
        num_epochs: number of epochs; None is endless.
        rows_per_example: 1, or 2 for pairs.
    """

    def __init__(
        self,
        dataset: DataProto,
        batch_size: int,
        seed: int,
        *,
        num_epochs: int | None = None,
        rows_per_example: int = 1,
    ) -> None:
        self._dataset = dataset
        self._batch_size = batch_size
        self._seed = seed
        self._rows_per_example = rows_per_example
        self._num_examples = len(dataset) // rows_per_example
        self._total = None if num_epochs is None else num_epochs * self._num_examples

    @property
    def num_steps(self) -> int:
        """Number of batches of all epochs."""
        assert self._total is not None
        return -(-self._total // self._batch_size)

    def epoch(self, step: int) -> float:
        """Return the number of epochs, with a fraction, that are complete after `step`."""
        done = step * self._batch_size
        return (done if self._total is None else min(done, self._total)) / self._num_examples

    def batch(self, step: int) -> DataProto:
        """Return the batch of `step`, from 1 on."""
        start = (step - 1) * self._batch_size
        count = self._batch_size if self._total is None else min(self._batch_size, self._total - start)
        examples = shuffled_rows(self._num_examples, self._seed, start, count)
        rows = (examples[:, None] * self._rows_per_example + np.arange(self._rows_per_example)).reshape(-1)
        return self._dataset[torch.from_numpy(rows)]
