"""Direct preference optimization (R. Rafailov et al., arXiv:2305.18290)."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from tidemill_dataproto import DataProto
from tidemill_dispatch.ray import RayWorkerGroup

from tidemill_trainer.sft.config import DPOConfig
from tidemill_trainer.sft.objective import balanced_order, parts_of, sequence_log_probs

_REFERENCE = "ref_sequence_log_probs"


@dataclass(frozen=True, kw_only=True, slots=True)
class Preferences:
    """The terms of P pairs, whose rows are the chosen and the rejected sequence in turn.

    Attributes:
        losses: [P] float64, -log sigmoid(m) (equation 7), or with label smoothing e the mean of -log sigmoid(m) and
            -log sigmoid(-m) with the weights 1 - e and e, where m is the margin.
        rewards: [2P] float64, beta * log(policy / reference) of each sequence.
        weights: [2P] float64, derivative of the sum of `losses` by the log-prob of each sequence.
    """

    losses: torch.Tensor
    rewards: torch.Tensor
    weights: torch.Tensor

    @classmethod
    def of(cls, log_probs: torch.Tensor, ref_log_probs: torch.Tensor, config: DPOConfig) -> "Preferences":
        """Compute the terms from the log-probs of the sequences, float64 [2P]."""
        rewards = config.beta * (log_probs - ref_log_probs)
        margins = rewards[0::2] - rewards[1::2]
        smoothing = config.label_smoothing
        losses = -(1 - smoothing) * F.logsigmoid(margins) - smoothing * F.logsigmoid(-margins)
        by_margin = -(1 - smoothing) * torch.sigmoid(-margins) + smoothing * torch.sigmoid(margins)
        signs = torch.tensor([1.0, -1.0], dtype=torch.float64).repeat(len(margins))
        return cls(losses=losses, rewards=rewards, weights=config.beta * by_margin.repeat_interleave(2) * signs)

    def metrics(self) -> dict[str, float]:
        """Return loss, rewards, margin and the share of the pairs with a positive margin (TRL's names)."""
        chosen, rejected = self.rewards[0::2], self.rewards[1::2]
        values: Mapping[str, torch.Tensor] = {
            "loss": self.losses,
            "rewards/chosen": chosen,
            "rewards/rejected": rejected,
            "rewards/accuracies": (chosen > rejected).double(),
            "rewards/margins": chosen - rejected,
        }
        return {name: value.mean().item() for name, value in values.items()}


class DPO:
    """Direct preference optimization.

    The loss of a pair couples two sequences, which may be in different micro-batches or on different ranks. So a step
    computes the log-probs of all sequences first. The derivative of the loss by the log-prob of a sequence is then a
    constant, and the gradient of the log-probs with these weights is exactly that of the loss.

    Args:
        workers: group of `SFTWorker`s.
        config: options of the loss.
    """

    rows_per_example = 2

    def __init__(self, workers: RayWorkerGroup, config: DPOConfig) -> None:
        self._workers = workers
        self._config = config

    def prepare(self, dataset: DataProto, batch_size: int = 256) -> DataProto:
        """Add the log-probs of the reference, which is the initial model."""
        parts = [sequence_log_probs(part, self._workers) for part in parts_of(dataset, batch_size)]
        return dataset.union(DataProto.from_dict({_REFERENCE: torch.cat(parts)}))

    def update(self, batch: DataProto) -> dict[str, float]:
        pairs = self._preferences(batch)
        weights = (pairs.weights / len(pairs.losses)).float()
        inputs = batch.select(["input_ids", "responses", "response_mask"], [])
        inputs = inputs.union(DataProto.from_dict({"sequence_weights": weights}))
        metrics = self._workers.update_weighted(inputs.reorder(balanced_order(inputs, self._workers)))[0]
        return metrics | pairs.metrics()

    def evaluate(self, dataset: DataProto, batch_size: int) -> dict[str, float]:
        log_probs = [
            sequence_log_probs(part, self._workers) for part in parts_of(dataset, batch_size * self.rows_per_example)
        ]
        return Preferences.of(torch.cat(log_probs), dataset[_REFERENCE], self._config).metrics()

    def _preferences(self, batch: DataProto) -> Preferences:
        return Preferences.of(sequence_log_probs(batch, self._workers), batch[_REFERENCE], self._config)
