"""The training worker of the policy: a Ray actor with one rank of its engine."""

from tidemill_dataproto import DataProto
from tidemill_dispatch import Dispatch, register
from tidemill_engines import BaseEngine, sft_loss
from tidemill_engines.config import OptimizerConfig

from tidemill_trainer.roles import build_policy
from tidemill_trainer.run_config import RunConfig
from tidemill_trainer.training_worker import POLICY, TrainingWorker, compute


class PolicyWorker(TrainingWorker):
    """One rank of the policy.

    Args:
        config: configuration of the run.
        log_dir: folder for the log of this process.
        group: name of the group of workers, in the name of the log.
    """

    def __init__(self, config: RunConfig, log_dir: str, group: str = "actor") -> None:
        super().__init__(config, log_dir, group)
        self._engine = build_policy(config)

    @register(Dispatch.ONE_TO_ALL, blocking=False)
    def init_model(self) -> None:
        """Load the model."""
        self._initialize(self._engine)

    @register(Dispatch.ONE_TO_ALL)
    def reset_optimizer(self, optimizer: OptimizerConfig) -> None:
        """Reset the optimizer and its schedule."""
        self._engine.reset_optimizer(optimizer)

    @register(compute)
    def update_sft(self, batch: DataProto) -> dict[str, float]:
        """Make one optimizer step of supervised fine-tuning on `input_ids`, `responses`, `response_mask`.

        Returns:
            Metrics of the loss and the engine's `performance()`, equal on all ranks.
        """
        return self._engine.train_batch(batch, sft_loss) | self._engine.performance()

    @register(Dispatch.ONE_TO_ALL)
    def save_hf(self, path: str) -> None:
        """Save the model to `path` in Hugging Face format."""
        self._engine.save_hf(path)

    def _trained(self) -> dict[str, BaseEngine]:
        return {POLICY: self._engine} | super()._trained()
