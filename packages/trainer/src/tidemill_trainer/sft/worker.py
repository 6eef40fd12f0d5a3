"""The training worker of `tidemill sft`."""

import torch
from tidemill_dataproto import DataProto, ragged
from tidemill_dispatch import register
from tidemill_engines.loss.contract import Normalizer
from tidemill_engines.model_io import ModelOutput

from tidemill_trainer.policy_worker import PolicyWorker
from tidemill_trainer.training_worker import compute


class SFTWorker(PolicyWorker):
    """One rank of the policy, which is also evaluated and trained on weighted sequences."""

    @register(compute)
    def log_probs(self, batch: DataProto) -> DataProto:
        """Compute the `log_probs` of the response tokens, ragged like `responses`, without dropout."""
        return self._engine.infer_batch(batch)

    @register(compute)
    def update_weighted(self, batch: DataProto) -> dict[str, float]:
        """Make one optimizer step on the loss `weighted_log_probs`.

        Returns:
            Metrics of the engine and its `performance()`, equal on all ranks.
        """
        return self._engine.train_batch(batch, weighted_log_probs) | self._engine.performance()


def weighted_log_probs(
    output: ModelOutput, micro_batch: DataProto, normalizer: Normalizer
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Sum of the log-probs of sequences, each times its constant weight.

    Args:
        output: log-probs of the response tokens.
        micro_batch: rows with `response_mask`, and `sequence_weights` [B], which contain any divisor.
        normalizer: not used.
    """
    mask = micro_batch["response_mask"]
    weights = ragged.expand_rows(micro_batch["sequence_weights"], mask) * ragged.values(mask)
    return (output.log_probs * weights.to(output.log_probs.dtype)).sum(), {}
