"""The training of one step: from the episodes of a batch to updated weights."""

from dataclasses import dataclass

import numpy as np
import torch
from tidemill_dataproto import DataProto, ragged

from tidemill_trainer.config import Config
from tidemill_trainer.episode_scores import add_scores
from tidemill_trainer.learner import Learner
from tidemill_trainer.metrics import batch_metrics, reward_components
from tidemill_trainer.mismatch import MismatchGate
from tidemill_trainer.rollout.episode_task import Episodes
from tidemill_trainer.staleness import check_staleness, staleness_of
from tidemill_trainer.timing import Timing


@dataclass(frozen=True, kw_only=True, slots=True)
class Trained:
    """A batch after its update.

    Attributes:
        episodes: its episodes, with the scores of the reward model.
        batch: their rows, with all columns of the update.
        metrics: metrics of the batch and the update.
    """

    episodes: Episodes
    batch: DataProto
    metrics: dict[str, float]

    @property
    def num_tokens(self) -> int:
        """Number of tokens with mask 1."""
        return int(ragged.values(self.batch["response_mask"]).bool().sum())


class TrainingStep:
    """Train on the episodes of a step, wherever they come from.

    Args:
        config: configuration of the run.
        learner: trains policy and critic.
        gate: compares the log-probs of rollout and training.
    """

    def __init__(self, config: Config, learner: Learner, gate: MismatchGate) -> None:
        self._config = config
        self._learner = learner
        self._gate = gate

    def run(self, step: int, episodes: Episodes, timing: Timing, *, num_engine_restarts: int = 0) -> Trained:
        """Update policy and critic.

        Args:
            step: number of the step, from 1; the weights have version `step` - 1.
            episodes: the episodes, of which at least one has a row.
            timing: times of the phases.
            num_engine_restarts: engines that were started again since the start of the run.

        Raises:
            StalenessError: a token is too old.
            MismatchError: the log-probs of rollout and training do not agree.
        """
        assert episodes.rows is not None
        of_keys = not self._config.rollout.recompute_kv_cache
        with timing("old_log_prob"):
            metrics = check_staleness(episodes.rows, step - 1, self._config.rollout.max_staleness)
            batch = self._learner.infer(episodes.rows.select())  # which adds and removes columns
            if not self._config.algorithm.bypass_mode and not self._learner.is_on_policy:
                metrics |= self._gate.check(batch, staleness_of(batch, step - 1, of_keys=of_keys), num_engine_restarts)
        with timing("adv"):
            if self._config.reward_model.path is not None:
                episodes = add_scores(episodes, batch, self._config)
            scored = self._score(episodes, step)
            batch, of_rewards = self._learner.add_advantages(batch, scored)
            metrics |= of_rewards
        with timing("update_actor"):
            batch, of_update = self._learner.update(batch, step)
            metrics |= of_update
            if self._learner.is_on_policy:
                metrics |= self._gate.check(batch, staleness_of(batch, step - 1, of_keys=of_keys), num_engine_restarts)
        with timing("adv"):
            metrics |= self._batch_metrics(batch, scored)
        return Trained(episodes=episodes, batch=batch, metrics=metrics)

    def _score(self, episodes: Episodes, step: int) -> DataProto:
        """Return `episode`, `scores`, `acc` [E] and `uid` of the E trainable episodes, and `order` [E] of rewards.

        Some estimators also read `reward_components` [E, K], or `baseline_rewards` [E] of the greedy episodes.
        """
        summaries = [summary for summary in episodes.summaries if summary.outcome.is_trainable]
        columns = {
            "episode": torch.tensor([summary.task.number for summary in summaries]),
            "scores": torch.tensor([summary.outcome.reward for summary in summaries], dtype=torch.float32),
            "acc": torch.tensor([summary.acc for summary in summaries], dtype=torch.float32),
        }
        if self._config.algorithm.shuffle_rewards:
            order = np.random.default_rng([self._config.trainer.seed, step, 1]).permutation(len(summaries))
            columns["order"] = torch.from_numpy(order)
        if names := self._config.algorithm.reward_components:
            columns["reward_components"] = reward_components(summaries, names)
        uid = [summary.task.problem.id for summary in summaries]
        if episodes.baselines:  # a problem without one has no rows
            greedy = {each.task.problem.id: each.outcome.reward for each in episodes.baselines}
            columns["baseline_rewards"] = torch.tensor([greedy[problem] for problem in uid], dtype=torch.float32)
        return DataProto.from_dict(columns, {"uid": np.array(uid, dtype=object)})

    def _batch_metrics(self, batch: DataProto, scored: DataProto) -> dict[str, float]:
        data, rollout = self._config.data, self._config.rollout
        return batch_metrics(
            batch, scored, max_prompt_length=data.max_prompt_length, response_length=rollout.response_length
        )
