"""Any loss, aggregation and correction has the same gradient for any split and order of the global mini-batch."""

import pytest
import torch
from loss_cases import counts_of, loss_and_gradient, make_batch
from tidemill_algorithms import POLICY_LOSSES, ActorLoss, rollout_correction, token_weights
from tidemill_dataproto import DataProto, ragged

MODES = ["token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm", "seq-mean-token-mean", "prompt-mean"]
REJECTION = {"rollout_rs": "seq_mean_k1", "rollout_rs_threshold": 1.3, "rollout_token_veto_threshold": 0.6}
CORRECTIONS = ["none", "weights", "rejection", "rejection, kept denominators", "bypass"]


@pytest.fixture(params=POLICY_LOSSES)
def loss_name(request):
    return request.param


@pytest.fixture(params=MODES)
def mode(request):
    return request.param


def loss_of(name, correction):
    bypass = dict(REJECTION) if correction == "bypass" else None
    if bypass is not None and name in ("policy_gradient", "forward_kl_topk"):
        bypass |= {"rollout_is": "token"}
    return ActorLoss(
        policy_loss=name, entropy_coeff=0.1, kl_loss_coef=0.2, kl_loss_type="k3+", bypass_correction=bypass
    )


def prepared(batch, mode, correction):
    """Add the columns that a driver computes over the global mini-batch."""
    mask, kept, columns = batch["response_mask"], None, {}
    difference = ragged.values(batch["old_log_probs"]) - ragged.values(batch["rollout_log_probs"])
    if correction == "weights":
        columns["rollout_is_weights"], _, _ = rollout_correction(
            ragged.like(difference, mask), mask, rollout_is="sequence", rollout_is_threshold=1.5
        )
    elif correction.startswith("rejection"):
        _, kept, _ = rollout_correction(ragged.like(difference, mask), mask, **REJECTION)
    columns["loss_weights"] = token_weights(
        mask,
        mode,
        uid=batch.non_tensor_batch["uid"] if mode == "prompt-mean" else None,
        loss_scale_factor=7.0 if mode == "seq-mean-token-sum-norm" else None,
        kept=kept,
        denominator="kept" if "kept" in correction else "original",
    )
    return batch.union(DataProto.from_dict(columns))


def run(loss, batch, log_probs, counts, parts):
    """Return loss, metrics and the gradient of each row of micro-batches with these rows, in the rows' order."""
    total, metrics, gradients = 0.0, {}, {}
    for rows in parts:
        own = ragged.index_rows(log_probs, rows)
        entropy = ragged.like(ragged.values(own).square(), own)
        value, gradient, reported = loss_and_gradient(loss, batch[rows], own, counts, entropy)
        total += value
        metrics = {name: metrics.get(name, 0.0) + share for name, share in reported.items()}
        gradients |= dict(zip(rows, gradient, strict=True))
    return total, metrics, [gradients[row] for row in sorted(gradients)]


def check_equal(actual, expected):
    assert actual[0] == pytest.approx(expected[0], rel=1e-6, abs=1e-9)
    assert actual[1] == pytest.approx(expected[1], rel=1e-6, abs=1e-9)
    assert len(actual[2]) == len(expected[2])
    for row, wanted in zip(actual[2], expected[2], strict=True):
        assert row == pytest.approx(wanted, rel=1e-6, abs=1e-9)


@pytest.mark.parametrize("correction", CORRECTIONS)
def test_gradient_does_not_depend_on_split_and_order(loss_name, mode, correction):
    batch, log_probs = make_batch(11, num_rows=8, dtype=torch.float64)
    batch, counts, loss = prepared(batch, mode, correction), counts_of(batch), loss_of(loss_name, correction)
    whole = run(loss, batch, log_probs, counts, [list(range(8))])
    assert any(any(row) for row in whole[2])
    check_equal(run(loss, batch, log_probs, counts, [[5, 0, 7], [1], [], [6, 3, 4, 2]]), whole)


@pytest.mark.parametrize("correction", ["weights", "rejection, kept denominators"])
def test_masked_rows_change_nothing(loss_name, mode, correction):
    batch, log_probs = make_batch(12, num_rows=6, dtype=torch.float64)
    other, other_log_probs = make_batch(13, num_rows=4, dtype=torch.float64)
    other.batch["response_mask"] = ragged.like(torch.zeros_like(ragged.values(other_log_probs)), other_log_probs)
    other.non_tensor_batch["uid"][:] = "another problem"
    both, loss = DataProto.concat([batch, other]), loss_of(loss_name, correction)
    both_log_probs = ragged.ragged(
        torch.cat([ragged.values(log_probs), ragged.values(other_log_probs)]), ragged.lengths(both["response_mask"])
    )
    alone = run(loss, prepared(batch, mode, correction), log_probs, counts_of(batch), [list(range(6))])
    joint = run(loss, prepared(both, mode, correction), both_log_probs, counts_of(both), [list(range(10))])
    assert not any(any(row) for row in joint[2][6:])
    check_equal((*joint[:2], joint[2][:6]), alone)


@pytest.mark.parametrize("correction", ["weights", "rejection, kept denominators"])
def test_two_identical_halves_equal_one(loss_name, mode, correction):
    batch, log_probs = make_batch(14, num_rows=6, dtype=torch.float64)
    loss, twice = loss_of(loss_name, correction), DataProto.concat([batch, batch])
    twice_log_probs = ragged.index_rows(log_probs, [*range(6), *range(6)])
    once = run(loss, prepared(batch, mode, correction), log_probs, counts_of(batch), [list(range(6))])
    both = run(loss, prepared(twice, mode, correction), twice_log_probs, counts_of(twice), [list(range(12))])
    halves = [[2 * value for value in row] for row in both[2]]
    check_equal((*both[:2], halves[:6]), once)
    check_equal((*both[:2], halves[6:]), once)
