import re

import pytest
import torch
from loss_cases import Output, counts_of, loss_and_gradient, make_batch, weigh
from tidemill_algorithms import POLICY_LOSSES, ActorLoss
from tidemill_dataproto import DataProto, ragged
from tidemill_engines import ModelOutput, Normalizer
from tidemill_trainer.losses import PPOLoss


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean"])
def test_vanilla_is_bitwise_the_loss_of_the_trainer(mode, seed):
    batch, log_probs = make_batch(seed, num_rows=12, spread=1.0)
    mask = batch["response_mask"]
    tokens = ragged.segment_sum(ragged.values(mask), mask)
    normalizer = Normalizer(num_tokens=max(1.0, tokens.sum().item()), num_sequences=max(1.0, (tokens > 0).sum().item()))
    clip = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.28, "clip_ratio_c": 2.0}
    ours = ActorLoss(policy_loss="vanilla", options=clip, entropy_coeff=0.01)
    theirs = PPOLoss(**clip, entropy_coeff=0.01, loss_agg_mode=mode)
    results = []
    for loss in (ours, theirs):
        leaves = [ragged.values(log_probs).clone(), torch.full_like(ragged.values(log_probs), 2.0)]
        leaves = [leaf.requires_grad_() for leaf in leaves]
        value, metrics = loss(ModelOutput(log_probs=leaves[0], entropy=leaves[1]), weigh(batch, mode), normalizer)
        value.backward()
        results.append((value, leaves[0].grad, leaves[1].grad, metrics))
    for own, their in zip(results[0][:3], results[1][:3], strict=True):
        assert torch.equal(own, their)
    assert results[0][3].keys() == results[1][3].keys()
    for name, metric in results[1][3].items():
        assert torch.equal(results[0][3][name], metric), name
    assert results[0][3]["actor/pg_clipfrac"] > 0


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
