"""What a run of `tidemill sft` minimizes: the loss of supervised fine-tuning, or another objective."""

from collections.abc import Iterator
from typing import Protocol

import torch
from tidemill_dataproto import DataProto, balance_rows, ragged
from tidemill_dispatch.ray import RayWorkerGroup

from tidemill_trainer.training_worker import MESH


class Objective(Protocol):
    """An objective that the workers minimize.

    Attributes:
        rows_per_example: number of consecutive rows of a data set that form one example.
    """

    rows_per_example: int

    def prepare(self, dataset: DataProto) -> DataProto:
        """Add the columns that depend on the initial model. Called before training, also when a run is resumed."""
        ...

    def update(self, batch: DataProto) -> dict[str, float]:
        """Make one optimizer step; return the metrics of the engine, with "loss", and its performance."""
        ...

    def evaluate(self, dataset: DataProto, batch_size: int) -> dict[str, float]:
        """Return "loss" and other metrics over a whole data set, computed on `batch_size` examples at a time."""
        ...


class SFT:
    """Supervised fine-tuning: mean negative log-likelihood per trained token.

    Args:
        workers: group of `PolicyWorker`s; `evaluate` requires `SFTWorker`s.
    """

    rows_per_example = 1

    def __init__(self, workers: RayWorkerGroup) -> None:
        self._workers = workers

    def prepare(self, dataset: DataProto) -> DataProto:
        return dataset

    def update(self, batch: DataProto) -> dict[str, float]:
        columns = batch.select(["input_ids", "responses", "response_mask"], [])
        return self._workers.update_sft(columns.reorder(balanced_order(columns, self._workers)))[0]

    def evaluate(self, dataset: DataProto, batch_size: int) -> dict[str, float]:
        log_probs = [sequence_log_probs(part, self._workers) for part in parts_of(dataset, batch_size)]
        num_tokens = ragged.values(dataset["response_mask"]).double().sum()
        return {"loss": (-torch.cat(log_probs).sum() / num_tokens).item()}


def parts_of(dataset: DataProto, num_rows: int) -> Iterator[DataProto]:
    """Yield the rows of a data set in order, `num_rows` at a time."""
    for start in range(0, len(dataset), num_rows):
        yield dataset[start : start + num_rows]


def sequence_log_probs(batch: DataProto, workers: RayWorkerGroup) -> torch.Tensor:
    """Compute the sum of the log-probs of the trained tokens of each row, float64 [B], without dropout."""
    order = balanced_order(batch, workers)
    inputs = batch.select(["input_ids", "responses"], []).reorder(order)
    column = ragged.index_rows(workers.log_probs(inputs)["log_probs"], order.argsort())
    mask = batch["response_mask"]
    return ragged.segment_sum(ragged.values(column).double() * ragged.values(mask).double(), mask)


def balanced_order(batch: DataProto, workers: RayWorkerGroup) -> torch.Tensor:
    """Return an order of the rows in which every data-parallel rank gets about the same number of tokens."""
    return balance_rows(ragged.lengths(batch["input_ids"]), workers.dp_size(MESH))
