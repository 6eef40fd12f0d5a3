"""gae, vapo and reinforce_plus_plus: advantages of tokens; and token rewards."""

import numpy as np
import pytest
import torch
from tidemill_algorithms import ADV_ESTIMATORS
from tidemill_algorithms.advantages import columns_of, uses_token_rewards
from tidemill_algorithms.rewards import returns_to_go, token_rewards
from tidemill_algorithms.trained_rows import TrainedRows, discounted_sums
from tidemill_algorithms.whitening import whiten
from tidemill_dataproto import DataProto, ragged


def batch_of(mask, **columns):
    """Make one row per list; columns are lists of rows."""
    layout = ragged.ragged_from_list([torch.tensor(row) for row in mask])
    flat = {name: ragged.like(torch.tensor([x for row in rows for x in row]), layout) for name, rows in columns.items()}
    rewards = torch.zeros(len(mask))
    return DataProto.from_dict({"response_mask": layout, "rewards": rewards, **flat}, {"uid": ["a"] * len(mask)})


@pytest.mark.parametrize(
    ("gamma", "lam", "returns"),
    [(1.0, 1.0, [6, 5, 3]), (0.5, 1.0, [2.75, 3.5, 3]), (1.0, 0.5, [3.625, 4.25, 3])],
)
def test_gae_has_the_known_returns(gamma, lam, returns):
    batch = batch_of([[1, 1, 1]], values=[[0.5, 1.0, 1.5]], token_level_rewards=[[1.0, 2.0, 3.0]])
    assert ragged.values(ADV_ESTIMATORS["gae"](batch, gamma=gamma, lam=lam)["returns"]).tolist() == returns


def test_gae_has_the_known_advantages_before_whitening():
    batch = batch_of([[1, 1, 1]], values=[[0.5, 1.0, 1.5]], token_level_rewards=[[1.0, 2.0, 3.0]])
    returns = ragged.values(ADV_ESTIMATORS["gae"](batch, gamma=0.99, lam=0.95)["returns"])
    assert (returns - ragged.values(batch["values"])).tolist() == pytest.approx([5.153953, 3.89575, 1.5], abs=1e-6)


@pytest.mark.parametrize("masked_value", [0.4, 100.0])
def test_gae_skips_the_tokens_of_observations(masked_value):
    rewards = [[0.0, 0.0, 0.0, 1.0]]
    batch = batch_of([[1, 0, 1, 1]], values=[[0.2, masked_value, 0.1, 0.5]], token_level_rewards=rewards)
    returns = ragged.values(ADV_ESTIMATORS["gae"](batch, lam=0.95)["returns"])
    advantages = (returns - ragged.values(batch["values"]))[[0, 2, 3]]
    assert advantages.tolist() == pytest.approx([0.73125, 0.875, 0.5], abs=1e-6)
    assert returns[1] == 0.0


def test_turns_before_an_observation_have_the_discounted_return_of_the_last_turn():
    batch = batch_of([[1, 1, 0, 0, 1, 0]], token_level_rewards=[[0.0, 0.0, 0.0, 0.0, 1.0, 0.0]])
    assert ragged.values(returns_to_go(batch, gamma=0.5)).tolist() == [0.25, 0.5, 0.0, 0.0, 1.0, 0.0]


def test_outcome_is_the_reward_of_the_last_trained_token_of_each_row():
    batch = batch_of([[1, 1, 0], [0, 0], [0, 1]])
    rows = ragged.ragged(torch.tensor([1, 1, 0, 0, 0, 0, 1]), [3, 0, 2, 2])
    outcomes = {"response_mask": rows, "rewards": torch.tensor([1.0, 2.0, 3.0, 4.0])}
    assert ragged.values(token_rewards(DataProto.from_dict(outcomes))).tolist() == [0, 1, 0, 0, 0, 0, 4]
    assert not ragged.values(token_rewards(batch)).any()


@pytest.mark.parametrize("name", ["gae", "vapo"])
def test_values_of_prompt_and_response_are_refused(name):
    batch = batch_of([[1, 1], [1]])
    batch.batch["values"] = ragged.ragged(torch.arange(5.0), [3, 2])
    with pytest.raises(ValueError, match="each of the 3 tokens of response_mask, got one with 5 values"):
        ADV_ESTIMATORS[name](batch)


def test_reward_of_a_token_that_is_not_trained_is_an_error():
    batch = batch_of([[1], [1, 0, 1]], values=[[0.0], [0.0] * 3], token_level_rewards=[[1.0], [0.0, 0.5, 1.0]])
    for name in ("gae", "reinforce_plus_plus", "vapo"):
        with pytest.raises(ValueError, match="another value in row 1"):
            ADV_ESTIMATORS[name](batch)


def test_equal_returns_of_the_whole_batch_give_no_advantage_and_some_group_alone_does():
    batch = batch_of([[1, 1], [1], [1]])
    assert not ragged.values(ADV_ESTIMATORS["reinforce_plus_plus"](batch)["advantages"]).any()
    uneven = DataProto.from_dict(
        {"response_mask": batch["response_mask"], "rewards": torch.tensor([1.0, 1.0, 0.0])}, {"uid": ["a", "a", "b"]}
    )
    advantages = ragged.values(ADV_ESTIMATORS["reinforce_plus_plus"](uneven)["advantages"])
    assert advantages.tolist() == pytest.approx([0.5, 0.5, 0.5, -1.5])
    assert not ragged.values(ADV_ESTIMATORS["reinforce_plus_plus_baseline"](uneven)["advantages"]).any()


def test_estimators_declare_what_they_read():
    assert {name: columns_of(estimator) for name, estimator in ADV_ESTIMATORS.items() if columns_of(estimator)} == {
        "gae": ("values",),
        "gdpo": ("reward_components",),
        "opd": ("teacher_log_prob", "old_log_probs"),
        "remax": ("baseline_rewards",),
        "vapo": ("values",),
    }
    with_token_rewards = {name for name, estimator in ADV_ESTIMATORS.items() if uses_token_rewards(estimator)}
    assert with_token_rewards == {"gae", "reinforce_plus_plus", "remax", "vapo"}


@pytest.mark.parametrize("discount", [1.0, 0.97, 1e-3, 0.0])
def test_discounted_sums_of_long_rows(discount):
    values = np.random.default_rng(0).normal(size=(2, 3001))
    expected = np.zeros_like(values)
    for t in reversed(range(3001)):
        expected[:, t] = values[:, t] + discount * (expected[:, t + 1] if t < 3000 else 0.0)
    np.testing.assert_allclose(discounted_sums(values, discount), expected, rtol=1e-12, atol=1e-12)


def test_trained_rows_of_a_batch_that_needs_several_chunks():
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(0, 4000, (200,), generator=generator)
    mask = ragged.ragged((torch.rand(int(lengths.sum()), generator=generator) < 0.5).int(), lengths)
    column = ragged.like(torch.randn(int(lengths.sum()), generator=generator), mask)
    out = np.zeros(int(lengths.sum()), dtype=np.float32)
    chunks = list(TrainedRows.of(mask))
    for rows in chunks:
        rows.write(rows.read(column), out)
    assert len(chunks) > 2
    assert [row for chunk in chunks for row in range(chunk.rows.start, chunk.rows.stop)] == list(range(200))
    assert torch.equal(torch.from_numpy(out), ragged.values(column) * ragged.values(mask))


def test_slime_2235_whitening_has_every_trained_token_of_the_batch_once():
    """Statistics that repeat the tokens of some ranks differ from those of the batch."""
    generator = torch.Generator().manual_seed(0)
    lengths = [100_000, 0, 3, 40_000]  # several blocks of the sums
    mask = ragged.ragged((torch.rand(140_003, generator=generator) < 0.7).int(), lengths)
    column = ragged.like(1000 + torch.randn(140_003, generator=generator).exp(), mask)
    is_trained = ragged.values(mask).bool()
    trained = ragged.values(column)[is_trained].double()
    expected = (trained - trained.mean()) / (trained.var() + 1e-8).sqrt()
    whitened = ragged.values(whiten(column, mask))
    torch.testing.assert_close(whitened[is_trained], expected.float(), rtol=1e-6, atol=1e-6)
    assert not whitened[~is_trained].any()


def test_whitening_of_one_token_and_of_none_is_zero():
    one, none = torch.tensor([0, 1]), torch.tensor([0, 0])
    for mask in (one, none):
        rows = ragged.ragged(mask, [1, 1])
        assert ragged.values(whiten(ragged.like(torch.tensor([3.0, 5.0]), rows), rows)).tolist() == [0.0, 0.0]


def test_opd_adds_the_teacher_and_the_task_and_ignores_masked_tokens():
    columns = {"teacher_log_prob": [[-1.0, 5.0, -3.0], [-2.0]], "old_log_probs": [[-2.0, 0.0, -1.0], [-2.5]]}
    batch = batch_of([[1, 0, 1], [1]], **columns)
    batch = DataProto.from_dict(
        {name: batch[name] for name in ("response_mask", *columns)} | {"rewards": torch.tensor([1.0, 0.0])},
        {"uid": ["a", "a"]},
    )
    opd = ADV_ESTIMATORS["opd"]
    assert ragged.values(opd(batch)["advantages"]).tolist() == [1.0, 0.0, -2.0, 0.5]
    both = ragged.values(opd(batch, opd_kl_coef=2.0, opd_task_coef=1.0)["advantages"]).tolist()
    assert both == pytest.approx([2.0 + 0.5**0.5, 0.0, -4.0 + 0.5**0.5, 1.0 - 0.5**0.5], abs=1e-5)


@pytest.mark.parametrize("name", ["gae", "grpo", "remax"])
def test_rewards_in_a_column_of_a_reward_model_are_refused(name):
    batch = batch_of([[1, 1], [1]], values=[[0.0, 0.0], [0.0]])
    batch.batch["rewards"], batch.batch["baseline_rewards"] = torch.ones(2, 1), torch.zeros(2)
    with pytest.raises(ValueError, match=r"expected one number per row in rewards, got shape \(2, 1\)"):
        ADV_ESTIMATORS[name](batch)


@pytest.mark.parametrize("name", ["gae", "reinforce_plus_plus", "vapo", "remax"])
def test_rewards_that_are_not_finite_are_refused(name):
    mask = ragged.ragged(torch.ones(3), [1, 1, 1])
    columns = {
        "response_mask": mask,
        "rewards": torch.tensor([1.0, torch.nan, 0.0]),
        "baseline_rewards": torch.zeros(3),
    }
    columns["values"] = ragged.like(torch.zeros(3), mask)
    batch = DataProto.from_dict(columns, {"uid": ["a", "a", "b"]})
    with pytest.raises(ValueError, match="expected finite rewards, got nan in row 1"):
        ADV_ESTIMATORS[name](batch)
    of_tokens = {"token_level_rewards": ragged.like(torch.tensor([1.0, 0.0, torch.inf]), mask)}
    batch = batch.union(DataProto.from_dict(of_tokens))
    with pytest.raises(ValueError, match="expected finite token_level_rewards, got inf in row 2"):
        ADV_ESTIMATORS[name](batch)


def test_greedy_reward_that_is_not_finite_is_refused():
    mask = ragged.ragged(torch.ones(2), [1, 1])
    greedy = torch.tensor([0.0, -torch.inf])
    batch = DataProto.from_dict({"response_mask": mask, "rewards": torch.zeros(2), "baseline_rewards": greedy})
    with pytest.raises(ValueError, match="expected finite baseline_rewards, got -inf in row 1"):
        ADV_ESTIMATORS["remax"](batch)


@pytest.mark.parametrize("name", ["gae", "reinforce_plus_plus"])
def test_columns_in_bfloat16_are_read(name):
    mask = ragged.ragged(torch.ones(3), [1, 2])
    columns = {
        "response_mask": mask,
        "rewards": torch.tensor([1.0, 0.5]),
        "values": ragged.like(torch.tensor([0.5, 0.25, 1.0]), mask),
    }
    exact = DataProto.from_dict(columns, {"uid": ["a", "b"]})
    columns = {
        **columns,
        "rewards": columns["rewards"].bfloat16(),
        "values": ragged.like(ragged.values(columns["values"]).bfloat16(), mask),
    }
    rounded = DataProto.from_dict(columns, {"uid": ["a", "b"]})
    found = [ragged.values(ADV_ESTIMATORS[name](batch)["advantages"]) for batch in (exact, rounded)]
    assert torch.equal(*found)
