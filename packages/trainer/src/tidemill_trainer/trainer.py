"""The training loop."""

from dataclasses import dataclass, replace

from tidemill_trainer.batch_record import BatchRecord, RecordedStep
from tidemill_trainer.checkpoint_saver import CheckpointSaver
from tidemill_trainer.checkpoints import Checkpoints
from tidemill_trainer.cluster import Cluster
from tidemill_trainer.config import Config
from tidemill_trainer.data import with_responses
from tidemill_trainer.episode_record import shown_records
from tidemill_trainer.episode_scores import add_scores
from tidemill_trainer.inputs import Inputs
from tidemill_trainer.learner import Learner
from tidemill_trainer.metrics import performance_metrics, validation_metrics
from tidemill_trainer.mismatch import MismatchGate
from tidemill_trainer.progress import Progress
from tidemill_trainer.role_groups import RoleGroups
from tidemill_trainer.rollouts import Rollouts
from tidemill_trainer.run_dir import RunDir
from tidemill_trainer.sft.batches import Batches
from tidemill_trainer.sft.objective import SFT
from tidemill_trainer.timing import Timing, is_due
from tidemill_trainer.training_step import Trained, TrainingStep


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """The result of a run.

    Attributes:
        steps: number of the last step.
        accuracy_before, accuracy: held-out accuracy before reinforcement learning and at the last validation; None
            without validation files.
    """

    steps: int
    accuracy_before: float | None
    accuracy: float | None


class Trainer:
    """Reinforcement learning on a running cluster.

    Args:
        config: configuration of the run.
        cluster: running workers; the caller starts and stops them.
        inputs: tokenizer and problems with `train`; without `val` the model is not validated.
        run: folder for metrics, rollouts and checkpoints.
        progress: terminal output.
    """

    def __init__(
        self,
        config: Config,
        cluster: Cluster,
        inputs: Inputs,
        run: RunDir,
        progress: Progress,
    ) -> None:
        assert inputs.train is not None
        self._config = config
        self._actor = cluster.actor
        self._engines, self._episodes = cluster.engines, cluster.episodes
        self._learner = Learner(config, RoleGroups(config, cluster.actor, cluster.roles))
        self._waits = cluster.watch.waits
        self._tokenizer = inputs.tokenizer
        with self._waits("load"):
            self._episodes.load(config)
        self._rollouts = Rollouts(config, self._episodes, inputs, run, progress, cluster.temporary)
        dtypes = config.rollout.quantization or config.rollout.dtype, config.engine.param_dtype
        gate = MismatchGate(config.rollout.max_log_prob_abs_diff, dtypes)
        self._training = TrainingStep(config, self._learner, gate)
        self._sft = SFT(cluster.actor)
        self._sft_batches = Batches(inputs.train, config.warmup.batch_size, config.trainer.seed + 1)
        self._run = run
        self._record = BatchRecord(run.batches)
        self._checkpoints = Checkpoints(run.checkpoints, config.trainer.max_ckpt_to_keep)
        self._saver = CheckpointSaver(self._checkpoints, self._learner.finish_checkpoint, self._waits, progress.warn)
        self._episodes.meanwhile = self._saver.commit
        self._progress = progress
        self._has_reward_model = config.reward_model.path is not None
        self._accuracy_before: float | None = None
        self._accuracy: float | None = None

    def fit(self) -> Result:
        """Train until `total_steps`, or until the held-out accuracy reaches `stop_at_accuracy`."""
        with self._saver:
            return self._fit(self._restore_or_begin())

    def _fit(self, step: int) -> Result:
        """Train after `step`."""
        config = self._config.trainer
        while step < config.total_steps and not self._reached(config.stop_at_accuracy):
            step += 1
            timing = Timing(self._waits)
            with timing("step"):
                with timing("gen"):
                    episodes = self._rollouts.take(step)
                    self._episodes.release()
                    self._saver.commit()
                starts = self._engines.num_restarts + self._engines.num_added
                trained = self._training.run(step, episodes, timing, num_engine_restarts=starts)
                if config.save_batches:
                    with timing("save_batch"):
                        hashes = self._learner.hash_weights()
                        recorded = RecordedStep(episodes=episodes, metrics=trained.metrics, weights=hashes)
                        self._record.save(step, recorded)
                metrics = trained.metrics | self._rollouts.settle(step, trained.episodes, trained.num_tokens)
                with timing("update_weights"):
                    metrics |= self._engines.update_weights(step)
                is_last = step == config.total_steps
                if is_last or is_due(step, config.test_freq):
                    with timing("testing"):
                        metrics |= self._validate()
                ends = is_last or self._reached(config.stop_at_accuracy)
                if is_due(step, config.save_freq) or (ends and config.save_freq >= 0):
                    with timing("save_checkpoint"):
                        self._saver.save(step, self._write_checkpoint)
            self._log(step, metrics, trained, timing)
            self._saver.commit()  # after the metrics are written, so that metrics.jsonl has every step of a checkpoint
        return Result(steps=step, accuracy_before=self._accuracy_before, accuracy=self._accuracy)

    def _restore_or_begin(self) -> int:
        """Load the newest checkpoint, or warm up; return the number of completed steps."""
        with self._waits("load"):
            self._learner.init_reward_model()
        steps = self._checkpoints.steps()
        if steps:
            path = self._checkpoints.path(steps[-1])
            step = self._checkpoints.read_step(path)
            with self._waits("roles"):
                self._learner.init_roles(self._run.initial_policy, is_resumed=True)
            with self._waits("load_checkpoint"), self._checkpoints.loading(path):
                self._learner.load_checkpoint(path)
            with self._waits("update_weights"):
                self._engines.update_weights(step)
            self._run.remove_after(step)
            self._record.remove_after(step)
            self._rollouts.resume(step, path)
            self._read_accuracy()
            self._progress.info(f"continuing after step {step} from {path}")
            self._warn_if_complete(step)
            return step
        self._run.begin(self._progress.warn)
        self._record.remove_after(-1)
        self._rollouts.resume(0, self._checkpoints.path(0))
        if self._config.warmup.max_steps > 0:
            self._warm_up()
        with self._waits("roles"):
            self._learner.init_roles(self._run.initial_policy, is_resumed=False)
        if self._config.warmup.max_steps > 0 and self._config.trainer.save_freq >= 0:
            with self._waits("save_checkpoint"):
                self._saver.save(0, self._write_checkpoint)
        with self._waits("update_weights"):
            self._engines.update_weights(0)
        if self._config.warmup.max_steps == 0 and self._config.trainer.val_before_train:
            self._run.append_metrics({"step": 0, "phase": "rl"} | self._validate())
        self._accuracy_before = self._accuracy
        return 0

    def _warm_up(self) -> None:
        """Fine-tune until the held-out accuracy is reached; the optimizer is reset before and after."""
        config, optimizer = self._config.warmup, self._config.optimizer
        self._actor.reset_optimizer(replace(optimizer, lr=config.lr, lr_scheduler="constant", total_steps=None))
        for step in range(1, config.max_steps + 1):
            timing = Timing(self._waits)
            with timing("step"):
                batch = with_responses(self._sft_batches.batch(step), self._tokenizer)
                with self._waits("sft"):
                    metrics = self._sft.update(batch)
                loss = {f"sft/{name}": value for name, value in metrics.items() if not name.startswith("perf/")}
                metrics = loss | performance_metrics([metrics])
                is_tested = step == config.max_steps or is_due(step, config.test_freq)
                if is_tested:
                    with self._waits("update_weights"):
                        self._engines.update_weights(f"warmup-{step}")
                    metrics |= self._validate()
                    self._episodes.release()  # without validation files, too
            # `step` counts steps of reinforcement learning, so it is 0 for the whole warm-up.
            self._run.append_metrics({"step": 0, "phase": "sft", "sft/step": step} | metrics | timing.metrics())
            if is_tested:
                self._progress.step("sft", metrics | timing.metrics() | {"step": step}, metrics.get("val/accuracy"))
            if is_tested and self._reached(config.until_accuracy):
                break
        self._actor.reset_optimizer(optimizer)

    def _validate(self) -> dict[str, float]:
        with self._waits("testing"):
            episodes = self._rollouts.validate()
            if episodes is None:
                return {}
            self._episodes.release()
            if self._has_reward_model and episodes.rows is not None:
                episodes = add_scores(episodes, self._learner.score(episodes.rows), self._config)
        metrics = validation_metrics(episodes.summaries)
        self._accuracy = metrics.get("val/accuracy", self._accuracy)
        return metrics

    def _write_checkpoint(self, folder: str) -> None:
        self._episodes.release()
        self._learner.save_checkpoint(folder)
        self._rollouts.save(folder)

    def _reached(self, accuracy: float | None) -> bool:
        return accuracy is not None and self._accuracy is not None and self._accuracy >= accuracy

    def _log(self, step: int, metrics: dict[str, float], trained: Trained, timing: Timing) -> None:
        seconds, num_workers = timing.seconds["step"], sum(self._config.training_workers().values())
        metrics |= timing.metrics() | {
            "perf/time_per_step": seconds,
            "perf/throughput": metrics["perf/total_num_tokens"] / seconds / num_workers,
        }
        self._run.append_metrics({"step": step, "phase": "rl"} | metrics)
        records = shown_records(trained.episodes, trained.batch, self._tokenizer)
        self._run.append_rollouts([{"step": step, **record} for record in records])
        self._progress.step("rl", metrics | {"step": step}, metrics.get("val/accuracy"))

    def _warn_if_complete(self, step: int) -> None:
        """Warn if there is nothing to train after `step`, and say why."""
        config = self._config.trainer
        if step >= config.total_steps:
            self._progress.warn(f"nothing to train: trainer.total_steps={config.total_steps} is reached; raise it")
        elif self._reached(config.stop_at_accuracy):
            self._progress.warn(
                f"nothing to train: the held-out accuracy {self._accuracy:.3f} has reached "
                f"trainer.stop_at_accuracy={config.stop_at_accuracy}; raise it, or leave it out"
            )

    def _read_accuracy(self) -> None:
        """Read the accuracies of a resumed run from its metrics."""
        for row in self._run.read_metrics():
            self._accuracy = row.get("val/accuracy", self._accuracy)
            if row["step"] == 0:
                self._accuracy_before = self._accuracy
