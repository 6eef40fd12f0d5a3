from dataclasses import replace

import pytest
from tidemill_rollout import Outcome
from tidemill_rollout.outcome import truncated
from tidemill_trainer.cli import DEMO_CONFIG
from tidemill_trainer.config_file import load_config
from tidemill_trainer.data import HELD_OUT
from tidemill_trainer.episodes import EpisodeError
from tidemill_trainer.inputs import load_inputs
from tidemill_trainer.rollout.episode_task import Episodes, EpisodeSummary
from tidemill_trainer.rollouts import Rollouts
from tidemill_trainer.run_dir import RunDir


class Pool:
    """A pool whose episodes are ok and generate nothing.

    Attributes:
        seeds: the seeds of the episodes of each call.
    """

    def __init__(self):
        self.seeds = []

    def start(self, tasks, *, greedy, finished=None):
        self.seeds.append([task.seed for task in tasks])
        return tasks

    def wait(self, tasks):
        summaries = [EpisodeSummary(task=task, outcome=Outcome(reward=1.0)) for task in tasks]
        return Episodes(rows=None, summaries=summaries, num_generated=0, num_lost=0, num_restarts=0)


class TruncatedPool(Pool):
    """A pool whose episodes exceed a limit, except the first `num_ok` of each call."""

    def __init__(self, num_ok):
        super().__init__()
        self._num_ok = num_ok

    def wait(self, tasks):
        episodes = super().wait(tasks)
        outcome = truncated("turns", "more than 5")
        late = [replace(summary, outcome=outcome) for summary in episodes.summaries[self._num_ok :]]
        return replace(episodes, summaries=episodes.summaries[: self._num_ok] + late)


@pytest.mark.parametrize("num_ok", [0, 255, 256])
def test_a_step_with_mostly_truncated_episodes_is_warned_about_once(num_ok, assets, tmp_path, progress, terminal):
    config = load_config(DEMO_CONFIG, [*assets])
    rollouts = Rollouts(config, TruncatedPool(num_ok), load_inputs(config, progress), RunDir(tmp_path), progress)
    for step in (1, 2):
        with pytest.raises(EpisodeError, match="none of 512 episodes sampled a token"):
            rollouts.take(step)
    shown = terminal.getvalue()
    message = f"{512 - num_ok} of 512 episodes of step 1 were truncated (turns: more than 5)"
    assert shown.count("truncated") == (num_ok < 256) * 2
    assert (message in " ".join(shown.split())) == (num_ok < 256)


@pytest.mark.parametrize("is_deterministic", ["true", "false"])
def test_each_session_has_a_seed_that_depends_on_run_step_problem_and_sample_alone(
    is_deterministic, assets, tmp_path, progress
):
    def seeds(seed):
        config = load_config(
            DEMO_CONFIG, [*assets, f"rollout.deterministic={is_deterministic}", f"trainer.seed={seed}"]
        )
        pool = Pool()
        rollouts = Rollouts(config, pool, load_inputs(config, progress), RunDir(tmp_path), progress)
        for step in (1, 2):
            with pytest.raises(EpisodeError, match=f"step {step}: none of 512 episodes sampled a token"):
                rollouts.take(step)
            episodes = rollouts.validate()
            assert episodes is not None
            assert len(episodes.summaries) == len(pool.seeds[-1])
            ordinals = [summary.task.problem.ordinal for summary in episodes.summaries]
            assert min(ordinals) == HELD_OUT > 512  # environments with other seeds than in the training
        return pool.seeds

    first, validation, second, again = seeds(0)
    assert len(first) == 512
    assert len({*first, *second, *validation}) == len(first) + len(second) + len(validation)
    assert validation == again
    assert seeds(0) == [first, validation, second, again]
    assert not set(first) & set(seeds(1)[0])


class FailingPool(Pool):
    """A pool whose first call has equal rewards; in each later one an episode fails."""

    def wait(self, tasks):
        episodes = super().wait(tasks)
        is_first = len(self.seeds) == 1
        outcomes = [Outcome(reward=float(task.sample % 2 and not is_first)) for task in tasks]
        if not is_first:
            outcomes[0] = Outcome(reward=0.0, status="environment_error", reason="ValueError: x")
        found = [replace(each, outcome=outcome) for each, outcome in zip(episodes.summaries, outcomes, strict=True)]
        return replace(episodes, summaries=found)


def test_share_of_failed_episodes_is_that_of_all_rounds_of_a_step(assets, tmp_path, progress, terminal):
    settings = ["algorithm.filter_groups=acc", "data.train_batch_size=1", "rollout.n=4"]
    settings += ["episode.max_error_share=0.2", "algorithm.max_num_gen_batches=2", "actor.num_workers=1"]
    config = load_config(DEMO_CONFIG, [*assets, *settings])
    rollouts = Rollouts(config, FailingPool(), load_inputs(config, progress), RunDir(tmp_path), progress)
    with pytest.raises(
        EpisodeError, match="none of 8 episodes sampled a token"
    ):  # 1 of 4 is more than a fifth, of 8 not
        rollouts.take(1)
    assert "1 of 8 episodes of step 1 failed" in " ".join(terminal.getvalue().split())
