import pytest
import torch
from tidemill_dataproto import DataProto, ragged
from tidemill_rollout import Outcome, Problem
from tidemill_trainer.group_filter import GroupFilter, joined, without
from tidemill_trainer.rollout.episode_task import Episodes, EpisodeSummary, EpisodeTask

FAILED = "failed"


def episodes(*groups, first=0):
    """Groups of two episodes with these rewards, numbered from group `first` on."""
    summaries = []
    for number, reward in enumerate([reward for group in groups for reward in group], start=2 * first):
        failed = {"status": "environment_error", "reason": "broken"}
        outcome = Outcome(reward=0.0, **failed) if reward == FAILED else Outcome(reward=reward)
        task = EpisodeTask(number=number, problem=Problem(prompt="?", id=f"{number // 2}"), sample=number % 2)
        summaries.append(EpisodeSummary(task=task, outcome=outcome))
    numbers = torch.tensor([summary.task.number for summary in summaries if summary.outcome.is_trainable])
    responses = ragged.ragged(torch.ones(len(numbers)), [1] * len(numbers))
    rows = DataProto.from_dict({"episode": numbers, "responses": responses})
    return Episodes(rows=rows, summaries=summaries, num_generated=len(numbers), num_lost=0, num_restarts=0)


def test_groups_with_equal_rewards_are_dropped_and_refilled():
    chosen = GroupFilter(num_groups=2, group_size=2, metric="score")
    first = episodes([1, 1], [0, 1])
    assert chosen.num_missing([]) == 2
    assert chosen.num_missing(first.summaries) == 2  # one is missing, and half of the groups are kept
    both = joined([first, episodes([1, 0], [0, 1], first=2)])
    assert chosen.num_missing(both.summaries) == 0
    result = chosen.apply(both)
    assert result.rows["episode"].tolist() == [2, 3, 4, 5]
    assert result.dropped == {0: "equal rewards", 1: "equal rewards", 6: "surplus", 7: "surplus"}
    assert chosen.metrics(result) == {
        "filter/num_groups": 4.0,
        "filter/num_equal_rewards": 1.0,
        "filter/num_surplus": 1.0,
    }


def test_rewards_are_compared_in_float32_as_training_has_them():
    chosen = GroupFilter(num_groups=1, group_size=2, metric="score")
    assert chosen.num_missing(episodes([0.1 + 0.2, 0.3]).summaries) == 1


def test_failed_episodes_are_no_members():
    chosen = GroupFilter(num_groups=1, group_size=2, metric="score")
    result = chosen.apply(episodes([FAILED, 1], [FAILED, FAILED], [0, 1]))
    assert result.rows["episode"].tolist() == [4, 5]
    assert result.dropped == {1: "equal rewards"}
    assert chosen.num_missing(result.summaries[:4]) == 1


def test_without_a_metric_every_group_is_kept():
    chosen = GroupFilter(num_groups=2, group_size=2, metric=None)
    batch = episodes([1, 1], [FAILED, FAILED])
    assert chosen.num_missing(batch.summaries) == 0
    assert chosen.apply(batch) is batch
    assert chosen.metrics(batch) == {}


@pytest.mark.parametrize(("metric", "kept"), [("acc", []), ("score", [0, 1])])
def test_metric_selects_accuracy_or_reward(metric, kept):
    outcomes = [Outcome(reward=reward, metrics={"acc": 1.0}) for reward in (0.5, 1.0)]
    tasks = [EpisodeTask(number=number, problem=Problem(prompt="?", id="0"), sample=number) for number in range(2)]
    summaries = [EpisodeSummary(task=task, outcome=outcome) for task, outcome in zip(tasks, outcomes, strict=True)]
    batch = Episodes(rows=episodes([1, 1]).rows, summaries=summaries, num_generated=2, num_lost=0, num_restarts=0)
    result = GroupFilter(num_groups=1, group_size=2, metric=metric).apply(batch)
    assert ([] if result.rows is None else result.rows["episode"].tolist()) == kept


def test_episodes_that_are_all_dropped_have_no_rows():
    batch = episodes([1, 0], [FAILED, 1])
    assert without(batch, dict.fromkeys([0, 1, 3], "no baseline")).rows is None
    assert without(batch, dict.fromkeys([0, 3], "no baseline")).rows["episode"].tolist() == [1]
