import math

import pytest
import torch
from tidemill_dataproto import DataProto, ragged
from tidemill_engines import ModelOutput, Normalizer
from tidemill_trainer.losses import PPOLoss, token_weights


def _batch(log_ratio, advantage, mask, lengths):
    layout = ragged.ragged(torch.tensor(mask, dtype=torch.float32), lengths)
    old = ragged.like(torch.zeros(len(mask)), layout)
    advantages = ragged.like(torch.tensor(advantage, dtype=torch.float32), layout)
    batch = DataProto.from_dict({"response_mask": layout, "old_log_probs": old, "advantages": advantages})
    return batch, ModelOutput(log_probs=torch.tensor(log_ratio, dtype=torch.float32, requires_grad=True))


@pytest.mark.parametrize(
    ("mode", "expected"),
    [("token-mean", 3.6), ("seq-mean-token-sum", 9.0), ("seq-mean-token-mean", 3.25)],
)
def test_token_weights_give_the_aggregation_and_add_up_over_micro_batches(mode, expected):
    mask = ragged.ragged(torch.tensor([1.0, 1, 0, 1, 1, 1]), [3, 3])
    values = torch.tensor([1.0, 2, 3, 4, 5, 6])
    normalizer = Normalizer(num_tokens=5, num_sequences=2)
    assert (values * token_weights(mask, normalizer, mode)).sum().item() == pytest.approx(expected)
    # The shares of two micro-batches add up to the whole.
    parts = [ragged.ragged(torch.tensor([1.0, 1, 0]), [3]), ragged.ragged(torch.tensor([1.0, 1, 1]), [3])]
    shares = [(values[3 * i : 3 * i + 3] * token_weights(m, normalizer, mode)).sum() for i, m in enumerate(parts)]
    assert sum(shares).item() == pytest.approx(expected)


def test_unknown_aggregation_is_rejected_with_the_known_ones():
    with pytest.raises(ValueError, match=r"must be one of token-mean, .*, got 'mean'"):
        token_weights(ragged.ragged(torch.ones(1), [1]), Normalizer(num_tokens=1, num_sequences=1), "mean")


@pytest.mark.parametrize(
    ("ratio", "advantage", "expected", "clipped", "lower"),
    [
        (1.5, 1, -1.2, 1, 0),
        (1.5, -1, 1.5, 0, 0),
        (0.5, 1, -0.5, 0, 0),
        (0.5, -1, 0.8, 1, 0),
        (5.0, -1, 3.0, 0, 1),
        (1.0, 1, -1.0, 0, 0),
    ],
)
def test_clip_and_dual_clip(ratio, advantage, expected, clipped, lower):
    batch, out = _batch([math.log(ratio)], [advantage], [1], [1])
    loss, metrics = PPOLoss(clip_ratio_c=3.0)(out, batch, Normalizer(num_tokens=1, num_sequences=1))
    assert loss.item() == pytest.approx(expected, rel=1e-6)
    assert metrics["actor/pg_loss"].item() == loss.item()
    assert metrics["actor/pg_clipfrac"].item() == clipped
    assert metrics["actor/pg_clipfrac_lower"].item() == lower
    assert metrics["actor/ppo_kl"].item() == pytest.approx(-math.log(ratio), abs=1e-7)


def test_on_policy_gradient_equals_reinforce():
    advantages, mask = [0.5, 0.5, -1.0, -1.0, -1.0], [1, 1, 1, 0, 1]
    batch, out = _batch([0.0] * 5, advantages, mask, [2, 3])
    loss, metrics = PPOLoss()(out, batch, Normalizer(num_tokens=4, num_sequences=2))
    loss.backward()
    expected = -torch.tensor(advantages) * torch.tensor(mask) / 4
    torch.testing.assert_close(out.log_probs.grad, expected)
    assert metrics["actor/ppo_kl"].item() == 0.0
    assert metrics["actor/pg_clipfrac"].item() == 0.0


def test_masked_tokens_do_not_change_loss_or_metrics():
    normalizer = Normalizer(num_tokens=2, num_sequences=1)
    results = [
        PPOLoss()(*reversed(_batch([0.1, lr, -0.1], [1.0, adv, 1.0], [1, 0, 1], [3])), normalizer)
        for lr, adv in ((0.0, 0.0), (3.0, -7.0))
    ]
    assert results[0][0].item() == results[1][0].item()
    assert {k: v.item() for k, v in results[0][1].items()} == {k: v.item() for k, v in results[1][1].items()}


def test_extreme_ratio_gives_a_finite_loss_and_gradient():
    batch, out = _batch([500.0], [-1.0], [1], [1])
    loss, _ = PPOLoss()(out, batch, Normalizer(num_tokens=1, num_sequences=1))
    loss.backward()
    assert math.isfinite(loss.item())
    assert torch.isfinite(out.log_probs.grad).all()


def test_entropy_bonus_lowers_the_loss():
    batch, out = _batch([0.0, 0.0], [1.0, 1.0], [1, 0], [2])
    out = ModelOutput(log_probs=out.log_probs, entropy=torch.tensor([2.0, 9.0]))
    loss, metrics = PPOLoss(entropy_coeff=0.1)(out, batch, Normalizer(num_tokens=1, num_sequences=1))
    assert loss.item() == pytest.approx(-1.0 - 0.1 * 2.0)
    assert metrics["actor/pg_loss"].item() == pytest.approx(-1.0)
    assert metrics["actor/entropy_loss"].item() == pytest.approx(2.0)
