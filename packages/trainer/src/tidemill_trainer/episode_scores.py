"""From the scores of a reward model to the rewards of episodes."""

from dataclasses import replace

from tidemill_dataproto import DataProto

from tidemill_trainer.config import Config
from tidemill_trainer.episodes import EpisodeError
from tidemill_trainer.metrics import RM_SCORE
from tidemill_trainer.rewards import has_own_reward
from tidemill_trainer.rollout.episode_task import Episodes, EpisodeSummary


def add_scores(episodes: Episodes, batch: DataProto, config: Config) -> Episodes:
    """Add `reward_model.coef` times the score of the reward model to the reward of each episode that has a row.

    The score is that of the last row of an episode's main branch, which has the whole conversation or its last part;
    without such a row, that of its last row. It becomes the metric "rm_score" of the outcome. Without another reward
    the sum is also the accuracy; else the accuracy does not change.

    Args:
        episodes: episodes of a step or a validation.
        batch: their rows, in order, with `episode`, `branch` and `rm_scores` [B].

    Raises:
        EpisodeError: a score is not finite.
    """
    rows = list(zip(batch["episode"].tolist(), batch["rm_scores"].tolist(), strict=True))
    is_main = batch.non_tensor_batch["branch"] == "main"
    scores = dict(rows) | dict(row for row, main in zip(rows, is_main, strict=True) if main)
    keeps_acc = has_own_reward(config)

    def scored(summary: EpisodeSummary) -> EpisodeSummary:
        score = scores.get(summary.task.number)
        if score is None:
            return summary
        outcome = summary.outcome
        reward = outcome.reward + config.reward_model.coef * score
        metrics = {**outcome.metrics, RM_SCORE: score} | ({"acc": summary.acc} if keeps_acc else {})
        try:
            return replace(summary, outcome=replace(outcome, reward=reward, metrics=metrics))
        except ValueError as error:  # not finite in float32
            raise EpisodeError(
                f"episode {summary.task.name}: expected a finite score of the reward model, got {score}; check "
                f"reward_model.path={config.reward_model.path} and engine.param_dtype={config.engine.param_dtype}"
            ) from error

    return replace(episodes, summaries=[scored(summary) for summary in episodes.summaries])
