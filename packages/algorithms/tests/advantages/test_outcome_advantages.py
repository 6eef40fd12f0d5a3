"""grpo, rloo, opo and remax: one advantage per episode."""

import numpy as np
import pytest
import torch
from tidemill_algorithms import ADV_ESTIMATORS
from tidemill_dataproto import DataProto, ragged
from tidemill_dataproto.padding import pad_dataproto_to_divisor

OUTCOME = ["grpo", "rloo", "opo"]


def batch_of(rewards, uid, lengths=None, mask=None, **columns):
    lengths = [1] * len(rewards) if lengths is None else lengths
    mask = torch.ones(sum(lengths)) if mask is None else torch.tensor(mask)
    columns = {"response_mask": ragged.ragged(mask, lengths), "rewards": torch.tensor(rewards), **columns}
    return DataProto.from_dict(columns, {"uid": list(uid)})


def per_row(name, batch, **options):
    return [row.tolist() for row in ADV_ESTIMATORS[name](batch, **options)["advantages"].unbind()]


def first_tokens(name, batch, **options):
    return [row[0] for row in per_row(name, batch, **options)]


@pytest.mark.parametrize(
    ("name", "options", "rewards", "expected"),
    [
        ("grpo", {}, [1.0, 0.0, 0.0, 0.0], [1.5, -0.5, -0.5, -0.5]),
        ("grpo", {"norm_adv_by_std_in_grpo": False}, [1.0, 0.0, 0.0, 0.0], [0.75, -0.25, -0.25, -0.25]),
        ("rloo", {}, [1.0, 0.0, 0.0, 0.0], [1, -1 / 3, -1 / 3, -1 / 3]),
        ("grpo", {}, [1.0, 1.0, 0.0, 0.0], [0.86602, 0.86602, -0.86602, -0.86602]),
        ("grpo", {"norm_adv_by_std_in_grpo": False}, [1.0, 1.0, 0.0, 0.0], [0.5, 0.5, -0.5, -0.5]),
        ("rloo", {}, [1.0, 1.0, 0.0, 0.0], [2 / 3, 2 / 3, -2 / 3, -2 / 3]),
    ],
)
def test_known_numbers(name, options, rewards, expected):
    assert first_tokens(name, batch_of(rewards, "aaaa"), **options) == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("name", OUTCOME)
def test_group_of_one_and_equal_rewards_have_exactly_no_advantage(name):
    batch = batch_of([0.1, 0.1, 0.1, 0.7, 1.0, 0.0], "aaabcc", [3, 1, 2, 4, 1, 1])
    assert first_tokens(name, batch)[:4] == [0.0] * 4
    assert first_tokens(name, batch)[4] > 0


@pytest.mark.parametrize("name", OUTCOME)
def test_failed_member_makes_its_group_smaller(name):
    batch = batch_of([1.0, 0.0, 0.5, 0.0, 0.3], "aabab", [1, 2, 3, 1, 2])
    alone = batch_of([1.0, 0.0], "aa", [1, 2])
    assert first_tokens(name, batch[[0, 1, 2, 4]])[:2] == first_tokens(name, alone)


@pytest.mark.parametrize("name", OUTCOME)
def test_masked_tokens_have_no_advantage_and_empty_rows_count(name):
    batch = batch_of([1.0, 0.0, 0.0], "aaa", [3, 0, 1], mask=[1, 0, 1, 0])
    rows = per_row(name, batch)
    assert rows[0][1] == 0.0
    assert rows[0][0] == rows[0][2]
    assert (rows[1], rows[2]) == ([], [0.0])
    if name != "opo":  # episodes without tokens have no weight there
        assert rows[0][0] > 0


def test_opo_weights_rewards_by_the_trained_tokens_of_all_rows_of_an_episode():
    columns = {"episode": torch.tensor([5, 5, 2])}
    batch = batch_of([1.0, 1.0, 0.0], "aaa", [2, 1, 4], mask=[1, 0, 1, 1, 1, 1, 0], **columns)
    baseline = 2 / 5
    assert per_row("opo", batch) == [
        pytest.approx([1 - baseline, 0]),
        pytest.approx([1 - baseline]),
        pytest.approx([-baseline, -baseline, -baseline, 0]),
    ]


def test_remax_subtracts_the_reward_of_the_greedy_episode():
    batch = batch_of([1.0, 1.0, 0.25], "aab", baseline_rewards=torch.tensor([1.0, 1.0, 1.0]))
    assert first_tokens("remax", batch) == [0.0, 0.0, -0.75]


@pytest.mark.parametrize("name", OUTCOME)
def test_column_that_would_have_no_effect_is_refused(name):
    batch = batch_of([1.0, 0.0], "aa", baseline_rewards=torch.zeros(2))
    batch = batch.union(DataProto.from_dict({"token_level_rewards": batch["response_mask"]}))
    with pytest.raises(ValueError, match="token_level_rewards"):
        ADV_ESTIMATORS[name](batch)


def test_reward_that_is_not_finite_is_an_error():
    with pytest.raises(ValueError, match="expected finite rewards, got nan in row 1"):
        ADV_ESTIMATORS["grpo"](batch_of([1.0, float("nan")], "aa"))


@pytest.mark.parametrize("with_episodes", [False, True])
def test_padding_rows_do_not_change_gdpo(with_episodes):
    mask = ragged.ragged(torch.ones(8), [2, 2, 2, 2])
    columns = {"response_mask": mask, "rewards": torch.tensor([1.0, 0.0, 1.0, 1.0])}
    columns["reward_components"] = torch.tensor([[1.0, 0.0], [0.0, 0.5], [1.0, 1.0], [0.0, 1.0]])
    if with_episodes:
        columns["episode"] = torch.arange(4)
    batch = DataProto.from_dict(columns, {"uid": np.array(["a", "a", "b", "b"], dtype=object)})
    padded, _ = pad_dataproto_to_divisor(batch, 7)
    alone, beside = (ragged.values(ADV_ESTIMATORS["gdpo"](each)["advantages"]) for each in (batch, padded))
    assert torch.equal(beside[:8], alone)
    assert not beside[8:].any()
