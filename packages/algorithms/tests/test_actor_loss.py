import re

import pytest
import torch
from loss_cases import Counts, Output, counts_of, loss_and_gradient, make_batch, weigh
from tidemill_algorithms import POLICY_LOSSES, ActorLoss
from tidemill_dataproto import DataProto, ragged


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"policy_loss": "ppo"}, r"policy_loss must be one of .*vanilla.*, got 'ppo'"),
        ({"options": {"tau_pos": 1.0}}, "vanilla has no option tau_pos; it has clip_ratio_low, clip_ratio_high, clip"),
        (
            {"policy_loss": "policy_gradient", "options": {"clip_ratio_low": 0.1}},
            "no option clip_ratio_low; it has none",
        ),
    ],
)
def test_unknown_loss_or_option_is_an_error(settings, message):
    with pytest.raises(ValueError, match=message):
        ActorLoss(**settings)


def test_policy_loss_may_be_a_function():
    def squared(log_probs, batch, *, scale=1.0):
        return scale * log_probs.square(), {"actor/mean": log_probs}

    batch, log_probs = make_batch(1)
    loss = ActorLoss(policy_loss=squared, options={"scale": 2.0})
    value, _, metrics = loss_and_gradient(loss, weigh(batch), log_probs, counts_of(batch))
    mask = ragged.values(batch["response_mask"]).bool()
    trained = ragged.values(log_probs)[mask]
    assert value == pytest.approx(2 * trained.square().mean().item(), rel=1e-5)
    assert metrics["actor/mean"] == pytest.approx(trained.mean().item(), rel=1e-5)


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (lambda terms: (terms.mean(), {}), r"the shape of the terms is \(\)"),  # as verl's functions
        (lambda terms: (terms[:, None], {}), r"the shape of the terms is \(\d+, 1\)"),
        (lambda terms: (terms, {"actor/mean": terms.mean()}), r"the shape of metric 'actor/mean' is \(\)"),
    ],
)
@pytest.mark.parametrize("bypass", [None, {}])
def test_terms_and_metrics_of_another_shape_are_an_error(returned, message, bypass):
    def own(log_probs, batch):
        return returned(-log_probs)

    batch, log_probs = make_batch(1)
    with pytest.raises(ValueError, match=f"policy loss own must return a term for each token.*{message}"):
        loss_and_gradient(
            ActorLoss(policy_loss=own, bypass_correction=bypass), weigh(batch), log_probs, counts_of(batch)
        )


def test_own_policy_loss_without_metrics_is_an_error_with_its_name():
    def own(log_probs, batch, *, scale=1.0):
        return -log_probs

    batch, log_probs = make_batch(1)
    with pytest.raises(TypeError, match=r"policy loss own must return \(terms, metrics\), got Tensor"):
        loss_and_gradient(ActorLoss(policy_loss=own), weigh(batch), log_probs, counts_of(batch))
    with pytest.raises(ValueError, match="policy loss own has no option sale; it has scale"):
        ActorLoss(policy_loss=own, options={"sale": 2.0})


def test_rollout_weights_multiply_terms_but_not_the_entropy():
    batch, log_probs = make_batch(2)
    entropy = ragged.like(torch.rand(len(ragged.values(log_probs))), log_probs)
    doubled = ragged.like(torch.full_like(ragged.values(log_probs), 2.0), batch["response_mask"])
    loss = ActorLoss(policy_loss="policy_gradient", entropy_coeff=0.5)
    weighed, counts = weigh(batch), counts_of(batch)
    _, _, plain = loss_and_gradient(loss, weighed, log_probs, counts, entropy)
    weighed = weighed.union(DataProto.from_dict({"rollout_is_weights": doubled}))
    value, _, twice = loss_and_gradient(loss, weighed, log_probs, counts, entropy)
    assert twice["actor/pg_loss"] == pytest.approx(2 * plain["actor/pg_loss"])
    assert twice["actor/entropy_loss"] == plain["actor/entropy_loss"]
    assert value == pytest.approx(twice["actor/pg_loss"] - 0.5 * twice["actor/entropy_loss"])


@pytest.mark.parametrize(
    "column", ["loss_weights", "rollout_is_weights", "ref_log_prob", "old_log_probs", "advantages"]
)
@pytest.mark.parametrize("size", [(1,), (5, 1)])
def test_columns_of_another_shape_are_an_error_instead_of_broadcast(column, size):
    mask = ragged.ragged(torch.ones(5), [5])
    names = ("response_mask", "loss_weights", "rollout_is_weights", "ref_log_prob", "old_log_probs", "advantages")
    columns = dict.fromkeys(names, mask) | {column: ragged.ragged(torch.ones(size), [size[0]])}
    with pytest.raises(ValueError, match=rf"column {column} must have one value for each response token, \(5,\) in"):
        ActorLoss(kl_loss_coef=0.1)(Output(torch.zeros(5)), DataProto.from_dict(columns), Counts(5.0))


@pytest.mark.parametrize("column", ["advantages", "old_log_probs"])
def test_not_finite_loss_names_row_and_token(column):
    batch, log_probs = make_batch(3)
    values = [row.clone() for row in batch[column].unbind()]
    row = next(row for row in range(2, 6) if batch["response_mask"].unbind()[row].any())
    token = int(batch["response_mask"].unbind()[row].argmax())
    values[row][token] = torch.nan
    broken = weigh(batch)
    broken.batch[column] = ragged.like(torch.cat(values), batch["response_mask"])
    message = (
        rf"finite policy loss, got nan at row {row} \(uid problem {row // 2}\).*response token {token}: .*{column} nan"
    )
    with pytest.raises(ValueError, match=message):
        ActorLoss()(Output(ragged.values(log_probs)), broken, counts_of(batch))


def test_entropy_coefficient_without_entropy_is_an_error():
    batch, log_probs = make_batch(3)
    with pytest.raises(ValueError, match=re.escape("(calculate_entropy=True)")):
        ActorLoss(entropy_coeff=0.1)(Output(ragged.values(log_probs)), weigh(batch), counts_of(batch))


def test_registry_is_read_only():
    with pytest.raises(TypeError):
        POLICY_LOSSES["mine"] = POLICY_LOSSES["vanilla"]  # type: ignore[index]


@pytest.mark.parametrize("name", [name for name in POLICY_LOSSES if name != "forward_kl_topk"])
def test_without_old_log_probs_the_current_policy_has_sampled_the_tokens(name):
    batch, log_probs = make_batch(4)
    sampled = weigh(batch)
    loss, counts = ActorLoss(policy_loss=name), counts_of(batch)
    old = DataProto.from_dict({"old_log_probs": ragged.like(ragged.values(log_probs).detach(), log_probs)})
    columns = [column for column in sampled.batch.keys() if column != "old_log_probs"]  # noqa: SIM118
    fresh = sampled.select(columns)
    assert loss_and_gradient(loss, fresh, log_probs, counts) == loss_and_gradient(
        loss, fresh.union(old), log_probs, counts
    )
