"""Each loss against float64 references written from the papers, row by row, with true gradients of sequence ratios."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from loss_cases import Counts, counts_of, loss_and_gradient, make_batch, topk_of, weigh
from tidemill_algorithms import POLICY_LOSSES, ActorLoss, CriticLoss
from tidemill_algorithms.losses import columns_of
from tidemill_dataproto import DataProto, ragged


def clip(x, low, high):
    return x.clamp(1 - low, 1 + high)


def ppo(log_p, old, a):
    r = (log_p - old).exp()
    term = torch.maximum(-r * a, -clip(r, 0.1, 0.3) * a)
    return (term if a >= 0 else term.clamp(max=-1.5 * a)).mean()


def gspo(log_p, old, a):
    s = (log_p - old).mean().exp()
    return -torch.minimum(s * a, clip(s, 0.01, 0.02) * a)


def cispo(log_p, old, a):
    return -(clip((log_p - old).exp(), 0.1, 0.2).detach() * a * log_p).mean()


def gmpo(log_p, old, a):
    sign = 1.0 if a >= 0 else -1.0
    r = (log_p - old).exp()
    clipped = sign * torch.minimum(sign * r, sign * clip(r, 0.2, 0.3))  # paper: min after the sign of A
    return -a * clipped.prod() ** (1 / len(r))


def sapo(log_p, old, a):
    tau = 1.5 if a > 0 else 2.0
    r = (log_p - old).exp()
    return -(4 / tau / (1 + (-tau * (r - 1)).exp()) * a).mean()


def dppo_tv(log_p, old, a):
    r = (log_p - old).exp()
    moved = log_p.exp() - old.exp()
    kept = moved <= 0.05 if a > 0 else moved >= -0.02
    return -(r * kept.detach() * a).mean()


def kl_of_outcomes(log_p, teacher):
    total = 0.0
    for p, q in zip(topk_of(log_p).exp(), teacher.exp(), strict=True):
        total = total + (q * (q / p).log()).sum() + (1 - q.sum()) * ((1 - q.sum()) / (1 - p.sum())).log()
    return total / len(teacher)


REFERENCES = {
    "vanilla": (ppo, {"clip_ratio_low": 0.1, "clip_ratio_high": 0.3, "clip_ratio_c": 1.5}),
    "gspo": (gspo, {"clip_ratio_low": 0.01, "clip_ratio_high": 0.02}),
    "cispo": (cispo, {"clip_ratio_low": 0.1, "clip_ratio_high": 0.2}),
    "geo_mean": (gmpo, {"clip_ratio_low": 0.2, "clip_ratio_high": 0.3}),
    "sapo": (sapo, {"tau_pos": 1.5, "tau_neg": 2.0}),
    "dppo_tv": (dppo_tv, {"divergence_high": 0.05, "divergence_low": 0.02}),
    "policy_gradient": (lambda log_p, old, a: -(a * log_p).mean(), {}),
    "forward_kl_topk": (kl_of_outcomes, {}),
}
OF_ADVANTAGES = [name for name, loss in POLICY_LOSSES.items() if not columns_of(loss)]


def test_all_losses_have_a_reference():
    assert REFERENCES.keys() == POLICY_LOSSES.keys()


@pytest.mark.parametrize("name", REFERENCES)
@settings(max_examples=30, deadline=None, derandomize=True)
@given(seed=st.integers(0, 10**6), spread=st.sampled_from([0.01, 0.3, 1.0]))
def test_loss_and_gradient_equal_the_reference(name, seed, spread):
    reference, options = REFERENCES[name]
    batch, log_probs = make_batch(seed, spread=spread, dtype=torch.float64)
    weighed = weigh(batch, "seq-mean-token-mean")
    leaf = ragged.values(log_probs).clone().requires_grad_()
    rows, losses = ragged.like(leaf, log_probs).unbind(), []
    names = ("old_log_probs", "advantages", "teacher_topk_log_probs", "response_mask")
    for row, old, a, teacher, mask in zip(rows, *(batch[column].unbind() for column in names), strict=True):
        trained = mask.bool()
        if mask.any():
            others = (old[trained], a[0]) if name in OF_ADVANTAGES else (teacher[trained],)
            losses.append(reference(row[trained], *others))
    expected = torch.stack(losses).mean() if losses else leaf.sum() * 0
    expected.backward()
    value, gradient, _ = loss_and_gradient(
        ActorLoss(policy_loss=name, options=options), weighed, log_probs, counts_of(batch)
    )
    assert value == pytest.approx(expected.item(), rel=1e-6, abs=1e-7)
    actual = torch.tensor([value for row in gradient for value in row], dtype=torch.float64)
    torch.testing.assert_close(actual, leaf.grad, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("name", OF_ADVANTAGES)
@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-sum", "prompt-mean"])
def test_on_policy_gradient_is_that_of_the_policy_gradient(name, mode):
    """Also with advantages that differ within a row, as those of a critic do."""
    batch, log_probs = make_batch(4, num_rows=12, spread=0.0)
    generator = torch.Generator().manual_seed(1)
    advantages = torch.randn(len(ragged.values(log_probs)), generator=generator)
    batch.batch["advantages"] = ragged.like(advantages, batch["response_mask"])
    weighed = weigh(batch, mode)
    _, gradient, metrics = loss_and_gradient(ActorLoss(policy_loss=name), weighed, log_probs, counts_of(batch))
    expected = -advantages * ragged.values(weighed["loss_weights"])
    torch.testing.assert_close(torch.tensor([value for row in gradient for value in row]), expected)
    assert metrics.get("actor/ppo_kl", 0.0) == 0.0
    assert metrics.get("actor/pg_clipfrac", 0.0) == 0.0


@pytest.mark.parametrize("name", OF_ADVANTAGES)
@pytest.mark.parametrize("log_ratio", [500.0, -500.0])
@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_extreme_ratio_gives_a_finite_loss_and_gradient(name, log_ratio, advantage):
    mask = ragged.ragged(torch.ones(2), [2])
    columns = {"old_log_probs": [-600.0, -1.0], "advantages": [advantage] * 2}
    columns = {column: ragged.like(torch.tensor(values), mask) for column, values in columns.items()}
    batch = weigh(DataProto.from_dict({"response_mask": mask, **columns}))
    log_probs = ragged.like(torch.tensor([-600.0 + log_ratio, -1.0]), mask)
    value, gradient, _ = loss_and_gradient(ActorLoss(policy_loss=name), batch, log_probs, Counts(2.0))
    assert math.isfinite(value)
    assert all(math.isfinite(one) for one in gradient[0])


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("vanilla", {"clip_ratio_low": -0.1}, "clip_ratio_low must be >= 0, got -0.1"),
        ("vanilla", {"clip_ratio_c": 1.0}, "clip_ratio_c must be > 1, got 1.0"),
        ("gspo", {"clip_ratio_high": -1.0}, "clip_ratio_high must be >= 0"),
        ("cispo", {"clip_ratio_high": -1.0}, "clip_ratio_high must be >= 0"),
        ("geo_mean", {"clip_ratio_low": 1.0}, "clip_ratio_low must be < 1"),
        ("sapo", {"tau_neg": 0.0}, "tau_pos and tau_neg must be > 0"),
        ("dppo_tv", {"divergence_low": -1.0}, "divergence_low must be >= 0"),
        ("dppo_tv", {"ratio_cap": 0.5}, "ratio_cap must be > 1"),
    ],
)
def test_invalid_options_are_errors(name, options, message):
    batch, log_probs = make_batch(0)
    with pytest.raises(ValueError, match=message):
        POLICY_LOSSES[name](ragged.values(log_probs), batch, **options)


class Values:
    def __init__(self, values):
        self.values = values


@pytest.mark.parametrize("seed", range(5))
def test_value_loss_equals_the_reference(seed):
    batch, column = make_batch(seed, spread=1.0)
    mask, values = batch["response_mask"], ragged.values(column)
    returns = -values
    batch = weigh(
        batch.union(DataProto.from_dict({"values": batch["old_log_probs"], "returns": ragged.like(returns, mask)}))
    )
    old, trained = ragged.values(batch["old_log_probs"]), ragged.values(mask).bool()
    terms, clips = [], 0
    for v, v_old, r in zip(values[trained].tolist(), old[trained].tolist(), returns[trained].tolist(), strict=True):
        clipped = min(max(v, v_old - 0.3), v_old + 0.3)
        terms.append(0.5 * max((v - r) ** 2, (clipped - r) ** 2))
        clips += (clipped - r) ** 2 > (v - r) ** 2
    loss, metrics = CriticLoss(cliprange_value=0.3)(Values(values), batch, counts_of(batch))
    assert loss.item() == metrics["critic/vf_loss"].item() == pytest.approx(sum(terms) / len(terms), rel=1e-5)
    assert metrics["critic/vf_clipfrac"].item() == pytest.approx(clips / len(terms))
    assert metrics["critic/vpred_mean"].item() == pytest.approx(values[trained].mean().item(), rel=1e-5)


@pytest.mark.parametrize("column", ["loss_weights", "values", "returns"])
def test_critic_loss_refuses_columns_of_another_shape(column):
    mask = ragged.ragged(torch.ones(5), [5])
    columns = dict.fromkeys(("response_mask", "loss_weights", "values", "returns"), mask)
    columns[column] = ragged.ragged(torch.ones(1), [1])
    with pytest.raises(ValueError, match=rf"column {column} must have one value for each response token"):
        CriticLoss()(Values(torch.zeros(5)), DataProto.from_dict(columns), Counts(5.0))


def test_gspo_caps_the_log_of_the_sequence_ratio_at_10():
    mask = ragged.ragged(torch.ones(1), [1])
    columns = {"old_log_probs": -12.0, "advantages": -1.0}
    columns = {name: ragged.like(torch.tensor([value]), mask) for name, value in columns.items()}
    batch = DataProto.from_dict({"response_mask": mask, **columns})
    terms, _ = POLICY_LOSSES["gspo"](torch.tensor([-1.0]), batch)
    assert terms.item() == pytest.approx(math.exp(10))
