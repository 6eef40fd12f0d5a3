"""The training loop of `tidemill sft`."""

from collections.abc import Mapping
from dataclasses import dataclass

from tidemill_dataproto import DataProto, ragged
from tidemill_engines.location import absolute

from tidemill_trainer.checkpoint_saver import CheckpointSaver
from tidemill_trainer.checkpoints import Checkpoints
from tidemill_trainer.metrics import performance_metrics
from tidemill_trainer.progress import Progress
from tidemill_trainer.run_dir import RunDir
from tidemill_trainer.sft.cluster import SFTCluster
from tidemill_trainer.sft.config import SFTConfig
from tidemill_trainer.sft.dpo import DPO
from tidemill_trainer.sft.inputs import SFTInputs, train_batches
from tidemill_trainer.sft.objective import SFT, Objective
from tidemill_trainer.timing import Timing, is_due


@dataclass(frozen=True, kw_only=True, slots=True)
class SFTResult:
    """The result of a run.

    Attributes:
        steps: number of the last step.
        loss_before, loss: validation loss before training and at the last validation; None without validation files.
    """

    steps: int
    loss_before: float | None
    loss: float | None


class SFTTrainer:
    """Supervised fine-tuning or DPO on a running cluster.

    Args:
        config: configuration of the run.
        cluster: running workers; the caller starts and stops them.
        inputs: training and validation rows.
        run: folder for metrics and checkpoints.
        progress: terminal output.
    """

    def __init__(
        self, config: SFTConfig, cluster: SFTCluster, inputs: SFTInputs, run: RunDir, progress: Progress
    ) -> None:
        self._config = config
        self._workers = cluster.workers
        self._waits = cluster.watch.waits
        self._objective: Objective = SFT(self._workers) if config.dpo is None else DPO(self._workers, config.dpo)
        with self._waits("reference"):
            self._batches = train_batches(config, self._objective.prepare(inputs.train))
            self._val = None if inputs.val is None else self._objective.prepare(inputs.val)
        self._run = run
        self._checkpoints = Checkpoints(run.checkpoints, config.trainer.max_ckpt_to_keep)
        self._saver = CheckpointSaver(self._checkpoints, self._is_written, self._waits, progress.warn)
        self._progress = progress

    def fit(self) -> SFTResult:
        """Train for `total_epochs`."""
        with self._saver:
            return self._fit(self._restore_or_begin())

    def _fit(self, done: int) -> SFTResult:
        """Train after step `done`."""
        config = self._config.trainer
        total = self._batches.num_steps
        for step in range(done + 1, total + 1):
            timing = Timing(self._waits)
            with timing("step"):
                with timing("update_actor"):
                    batch = self._batches.batch(step)
                    metrics = self._train_metrics(step, batch, self._objective.update(batch))
                if step == total or is_due(step, config.test_freq):
                    with timing("testing"):
                        metrics |= self._validate()
                if is_due(step, config.save_freq) or (step == total and config.save_freq >= 0):
                    with timing("save_checkpoint"):
                        self._saver.save(step, self._write_checkpoint)
            self._log(step, metrics | timing.metrics())
            self._saver.commit()  # after the metrics are written, so that metrics.jsonl has every step of a checkpoint
        losses = [row["val/loss"] for row in self._run.read_metrics() if "val/loss" in row]
        return SFTResult(steps=total, loss_before=losses[0] if losses else None, loss=losses[-1] if losses else None)

    def _restore_or_begin(self) -> int:
        """Load the newest checkpoint, or validate the initial model; return the number of completed steps."""
        steps = self._checkpoints.steps()
        if steps:
            path = self._checkpoints.path(steps[-1])
            step = self._checkpoints.read_step(path)
            with self._waits("load_checkpoint"), self._checkpoints.loading(path):
                self._workers.load_checkpoint(absolute(path))
            self._run.remove_after(step)
            self._progress.info(f"continuing after step {step} from {path}")
            self._warn_about_smaller_batch(step)
            return step
        self._run.begin(self._progress.warn)
        if self._val is not None:
            timing = Timing(self._waits)
            with timing("testing"):
                metrics = self._validate()
            self._log(0, metrics | timing.metrics())
        return 0

    def _warn_about_smaller_batch(self, step: int) -> None:
        """Warn if the run ended with `step` before, with a smaller batch than the step has with more epochs."""
        epochs = {row["step"]: row.get("train/epoch") for row in self._run.read_metrics()}
        trained = epochs.get(step)
        if trained is not None and trained < self._batches.epoch(step):
            self._progress.warn(
                f"step {step} had a smaller batch, because the run ended there after epoch {trained:g}: the examples "
                "that would complete it are left out of the next epoch"
            )

    def _train_metrics(self, step: int, batch: DataProto, metrics: Mapping[str, float]) -> dict[str, float]:
        own = {f"train/{name}": value for name, value in metrics.items() if not name.startswith("perf/")}
        return {
            **own,
            "train/epoch": self._batches.epoch(step),
            "train/global_tokens": float(ragged.values(batch["input_ids"]).numel()),
            "train/loss_tokens": ragged.values(batch["response_mask"]).sum().item(),
            **performance_metrics([metrics]),
        }

    def _validate(self) -> dict[str, float]:
        if self._val is None:
            return {}
        metrics = self._objective.evaluate(self._val, self._config.data.train_batch_size)
        return {f"val/{name}": value for name, value in metrics.items()}

    def _write_checkpoint(self, folder: str) -> None:
        self._workers.save_checkpoint(absolute(folder))

    def _is_written(self, waits: bool) -> bool:
        return all(self._workers.finish_checkpoint(waits=waits))

    def _log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.append_metrics({"step": step} | dict(metrics))
        self._progress.sft_step(step, metrics)
