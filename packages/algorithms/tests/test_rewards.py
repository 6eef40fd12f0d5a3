import pytest
import torch
from hypothesis import given, settings
from random_batches import random_batch, row_counts, seeds
from tidemill_algorithms import ADV_ESTIMATORS, Groups, has_signal, kl_penalty, overlong_penalty, token_rewards
from tidemill_dataproto import DataProto, ragged


@settings(max_examples=30, deadline=None)
@given(seed=seeds, num_rows=row_counts)
def test_kl_penalty_is_subtracted_at_every_trained_token(seed, num_rows):
    batch = random_batch(seed, num_rows)
    rewards = token_rewards(batch, kl_coef=0.2, kl_penalty="k3").unbind()
    columns = zip(*(batch[name].unbind() for name in ("response_mask", "old_log_probs", "ref_log_prob")), strict=True)
    for row, (mask, old, ref) in enumerate(columns):
        expected = torch.where(mask.bool(), -0.2 * kl_penalty(old, ref, "k3"), 0.0)
        if mask.any():
            expected[mask.nonzero()[-1]] += batch["rewards"][row]
        torch.testing.assert_close(rewards[row], expected)


def test_kl_penalty_in_the_reward_has_an_effect_or_is_refused():
    batch = random_batch(0, 12)
    penalized = batch.union(DataProto.from_dict({"token_level_rewards": token_rewards(batch, kl_coef=0.2)}))
    for name, estimator in ADV_ESTIMATORS.items():
        if name in ("gae", "reinforce_plus_plus", "remax", "vapo"):
            pair = (ragged.values(estimator(rows)["advantages"]) for rows in (batch, penalized))
            assert not torch.allclose(*pair)
        else:
            with pytest.raises(ValueError, match="token_level_rewards"):
                estimator(penalized)


def test_overlong_penalty_is_linear_in_the_buffer_and_full_beyond_the_limit():
    lengths = torch.tensor([0, 4096, 16384, 18432, 20480, 30000])
    penalty = overlong_penalty(lengths, max_response_length=20480, overlong_buffer_len=4096, penalty_factor=2.0)
    assert penalty.tolist() == [0, 0, 0, -1, -2, -2]


@pytest.mark.parametrize("buffer", [0, 101])
def test_overlong_buffer_that_does_not_fit_the_limit_is_an_error(buffer):
    with pytest.raises(
        ValueError, match=f"overlong_buffer_len must be from 1 to max_response_length=100, got {buffer}"
    ):
        overlong_penalty(torch.tensor([1]), max_response_length=100, overlong_buffer_len=buffer)


def test_groups_without_signal_are_those_whose_advantages_are_zero():
    batch = random_batch(3, 40)
    groups = Groups.of(batch)
    advantages = groups.centred(groups.rewards)
    kept = has_signal(groups)
    assert 0 < kept.sum() < len(kept)
    for group, is_kept in enumerate(kept.tolist()):
        assert bool(advantages[groups.group == group].any()) == is_kept


def test_signal_of_other_values_than_the_rewards():
    mask = ragged.ragged(torch.ones(4), [1, 1, 1, 1])
    columns = {"response_mask": mask, "rewards": torch.tensor([0.1, 0.2, 0.1, 0.2])}
    groups = Groups.of(DataProto.from_dict(columns, {"uid": ["a", "a", "b", "b"]}))
    assert has_signal(groups).tolist() == [True, True]
    assert has_signal(groups, torch.tensor([1.0, 1.0, 0.0, 1.0])).tolist() == [False, True]
