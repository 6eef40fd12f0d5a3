import pytest
import torch
from tidemill_algorithms import Groups
from tidemill_dataproto import DataProto, ragged


def batch_of(rewards, uid, lengths, **columns):
    mask = ragged.ragged(torch.ones(sum(lengths)), lengths)
    return DataProto.from_dict({"response_mask": mask, "rewards": torch.tensor(rewards), **columns}, {"uid": uid})


def test_statistics_of_groups_in_any_order_of_rows():
    groups = Groups.of(batch_of([1.0, 5.0, 0.0, 2.0], ["a", "b", "a", "a"], [1, 2, 0, 3]))
    assert groups.counts.tolist() == [3, 1]
    assert groups.mean(groups.rewards).tolist() == [1.0, 5.0]
    assert groups.std(groups.rewards).tolist() == [1.0, 0.0]
    assert groups.lengths.tolist() == [1, 2, 0, 3]


def test_episode_with_several_rows_counts_once_and_all_its_rows_have_its_advantage():
    batch = batch_of([1.0, 0.0, 1.0], ["a", "a", "a"], [1, 2, 1], episode=torch.tensor([7, 3, 7]))
    groups = Groups.of(batch)
    assert groups.mean(groups.rewards).tolist() == [0.5]
    advantages = groups.to_tokens(groups.rewards - 0.5)
    assert [row.tolist() for row in advantages.unbind()] == [[0.5], [-0.5, -0.5], [0.5]]


@pytest.mark.parametrize(("rewards", "uid", "name"), [([1.0, 0.0], "aa", "rewards"), ([1.0, 1.0], "ab", "uid")])
def test_rows_of_one_episode_that_differ_are_an_error(rewards, uid, name):
    batch = batch_of(rewards, list(uid), [1, 1], episode=torch.tensor([0, 0]))
    with pytest.raises(ValueError, match=f"equal {name} in all rows of an episode, but row 1 differs from row 0"):
        Groups.of(batch)
