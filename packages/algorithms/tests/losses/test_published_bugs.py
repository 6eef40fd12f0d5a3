"""One test per published bug of normalisation in other libraries, named after its issue."""

from itertools import pairwise

import pytest
import torch
from loss_cases import counts_of, loss_and_gradient, make_batch, weigh
from tidemill_algorithms import POLICY_LOSSES, ActorLoss, CriticLoss, rollout_correction
from tidemill_dataproto import DataProto, ragged


def ranks_of(batch, log_probs, num_ranks):
    """Split rows over data-parallel ranks, unevenly: the last rank has the remaining rows."""
    bounds = [*range(0, 2 * num_ranks, 2), len(batch)]
    for start, stop in pairwise(bounds):
        rows = list(range(start, stop))
        yield batch[rows], ragged.index_rows(log_probs, rows)


def total_gradient(loss, batch, log_probs, num_ranks):
    """Sum what the ranks contribute, as the engines do, with the gradient of each row."""
    counts = counts_of(batch)
    parts = [loss_and_gradient(loss, *part, counts) for part in ranks_of(batch, log_probs, num_ranks)]
    return sum(value for value, _, _ in parts), [row for _, rows, _ in parts for row in rows]


def check_ranks(loss, mode):
    batch, log_probs = make_batch(21, num_rows=12)
    weighed = weigh(batch, mode)
    expected, gradient = total_gradient(loss, weighed, log_probs, 1)
    for num_ranks in (2, 4):
        actual, rows = total_gradient(loss, weighed, log_probs, num_ranks)
        assert actual == pytest.approx(expected, rel=1e-5)
        for row, wanted in zip(rows, gradient, strict=True):
            assert row == pytest.approx(wanted, rel=1e-5)


@pytest.mark.parametrize("name", ["gspo", "sapo"])
@pytest.mark.parametrize("mode", ["seq-mean-token-mean", "seq-mean-token-sum"])
def test_verl_5798_sequence_means_do_not_shrink_with_the_number_of_ranks(name, mode):
    check_ranks(ActorLoss(policy_loss=name), mode)


def test_verl_5366_and_5417_token_sum_norm_is_a_mean_over_all_sequences():
    check_ranks(ActorLoss(), "seq-mean-token-sum-norm")


def test_verl_5625_and_prime_rl_583_token_mean_counts_the_tokens_of_all_micro_batches():
    check_ranks(ActorLoss(), "token-mean")
    mask = ragged.ragged(torch.tensor([1.0, 1, 0, 1, 1, 1]), [3, 3])
    columns = {"old_log_probs": [0.0] * 6, "advantages": [-1.0, -2, -3, -4, -5, -6]}
    columns = {name: ragged.like(torch.tensor(values), mask) for name, values in columns.items()}
    batch = weigh(DataProto.from_dict({"response_mask": mask, **columns}))
    log_probs = ragged.like(torch.zeros(6), mask)
    rows = [(batch[[row]], ragged.index_rows(log_probs, [row])) for row in (0, 1)]
    loss = sum(loss_and_gradient(ActorLoss(), *row, counts_of(batch))[0] for row in rows)
    assert loss == pytest.approx(3.6)  # a mean of the means of micro-batches is 3.25


class Values:
    def __init__(self, values):
        self.values = values


def test_verl_6957_critic_loss_counts_the_tokens_of_all_micro_batches():
    batch, log_probs = make_batch(22, num_rows=8)
    columns = {"values": batch["old_log_probs"], "returns": batch["rollout_log_probs"]}
    batch = weigh(batch.union(DataProto.from_dict(columns)))
    counts = counts_of(batch)
    whole, _ = CriticLoss()(Values(ragged.values(log_probs)), batch, counts)
    parts = [[0, 1, 2], [3], [4, 5, 6, 7]]
    shares = [CriticLoss()(Values(ragged.values(ragged.index_rows(log_probs, p))), batch[p], counts)[0] for p in parts]
    assert whole.item() > 0
    assert torch.stack(shares).sum().item() == pytest.approx(whole.item(), rel=1e-5)


def test_verl_7200_loss_towards_another_policy_counts_the_tokens_of_all_micro_batches():
    """Distillation from a teacher: the KL penalty to its log-probabilities is the loss."""
    batch, _ = make_batch(23)
    batch.batch["advantages"] = ragged.like(0 * ragged.values(batch["advantages"]), batch["response_mask"])
    check_ranks(ActorLoss(policy_loss="policy_gradient", kl_loss_coef=1.0, kl_loss_type="k2"), "token-mean")


def test_nemo_rl_212_micro_batch_without_a_trained_token_adds_nothing():
    batch, log_probs = make_batch(24)  # the first two rows have no trained token
    weighed, counts = weigh(batch), counts_of(batch)
    rest = list(range(2, 6))
    value, gradient, metrics = loss_and_gradient(
        ActorLoss(), weighed[[0, 1]], ragged.index_rows(log_probs, [0, 1]), counts
    )
    assert value == 0.0
    assert not any(any(row) for row in gradient)
    assert not any(metrics.values())
    alone = loss_and_gradient(ActorLoss(), weighed[rest], ragged.index_rows(log_probs, rest), counts)
    trained = batch[rest]
    own = loss_and_gradient(ActorLoss(), weigh(trained), ragged.index_rows(log_probs, rest), counts_of(trained))
    assert alone[0] == own[0]


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_liger_kernel_1088_rollout_weights_scale_the_gradient_of_every_loss(name):
    batch, log_probs = make_batch(25)
    mask = batch["response_mask"]
    weights, _, _ = rollout_correction(
        ragged.like(ragged.values(batch["old_log_probs"]) - ragged.values(batch["rollout_log_probs"]), mask),
        mask,
        rollout_is="token",
    )
    weighed, counts = weigh(batch), counts_of(batch)
    _, plain, _ = loss_and_gradient(ActorLoss(policy_loss=name), weighed, log_probs, counts)
    weighed = weighed.union(DataProto.from_dict({"rollout_is_weights": weights}))
    _, corrected, _ = loss_and_gradient(ActorLoss(policy_loss=name), weighed, log_probs, counts)
    assert any(any(row) for row in plain)
    for row, wanted, factor in zip(corrected, plain, weights.unbind(), strict=True):
        assert row == pytest.approx([g * w for g, w in zip(wanted, factor.tolist(), strict=True)], rel=1e-5, abs=1e-9)


def test_trl_5814_sequence_ratio_is_a_mean_and_does_not_grow_with_the_length():
    mask = ragged.ragged(torch.ones(1001), [1, 1000])
    columns = {"old_log_probs": torch.zeros(1001), "advantages": torch.ones(1001)}
    columns = {name: ragged.like(values, mask) for name, values in columns.items()}
    batch = DataProto.from_dict({"response_mask": mask, **columns})
    log_ratio = torch.full((1001,), 0.01)
    for name in ("gspo", "geo_mean"):
        terms, _ = POLICY_LOSSES[name](log_ratio, batch, clip_ratio_high=0.5)
        torch.testing.assert_close(terms, torch.full((1001,), -1.01005), rtol=1e-5, atol=0)
    for rule, expected in (("seq_mean_k1", [True, True]), ("seq_sum_k1", [True, False])):
        _, kept, _ = rollout_correction(ragged.like(log_ratio, mask), mask, rollout_rs=rule, rollout_rs_threshold=1.1)
        assert [row[0].item() for row in kept.unbind()] == expected
