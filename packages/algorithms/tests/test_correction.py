import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from loss_cases import counts_of, loss_and_gradient, make_batch, weigh
from tidemill_algorithms import ActorLoss, rollout_correction
from tidemill_dataproto import DataProto, ragged

UNITS = {"seq_sum": sum, "seq_mean": lambda values: sum(values) / len(values), "seq_max": max}
MEASURES = {"k1": lambda x: x, "k2": lambda x: x * x / 2, "k3": lambda x: math.exp(x) - 1 - x}
RULES = [f"{unit}_{kind}" for unit in ("token", *UNITS) for kind in MEASURES if (unit, kind) != ("seq_max", "k1")]


def reference(log_ratios, masks, *, level, upper, lower, rule, rs_upper, rs_lower, veto):
    """Return weights and kept tokens of each row, in float64."""
    all_weights, all_kept = [], []
    for row, mask in zip(log_ratios, masks, strict=True):
        own = [x for x, m in zip(row, mask, strict=True) if m]
        w = [math.exp(sum(own)) if level == "sequence" else math.exp(x) for x in row]
        w = [min(x, upper) for x in w] if lower is None else [x * (lower <= x <= upper) for x in w]
        unit, kind = rule.rsplit("_", 1)
        measured = [MEASURES[kind](x) for x in row]
        if unit != "token":
            of_row = UNITS[unit]([m for m, is_own in zip(measured, mask, strict=True) if is_own] or [0.0])
            measured = [of_row] * len(row)
        if kind == "k1":
            kept = [rs_lower <= math.exp(x) <= rs_upper for x in measured]
        else:
            kept = [x <= rs_upper for x in measured]
        is_vetoed = any(math.exp(x) < veto for x in own)
        all_weights.append([x * m for x, m in zip(w, mask, strict=True)])
        all_kept.append([x and not is_vetoed for x in kept])
    return all_weights, all_kept


@pytest.mark.parametrize("rule", RULES)
@settings(max_examples=15, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 10**6),
    level=st.sampled_from(["token", "sequence"]),
    lower=st.sampled_from([None, 0.6]),
    rs_lower=st.sampled_from([None, 0.9]),
)
def test_weights_and_kept_tokens_equal_the_reference(rule, seed, level, lower, rs_lower):
    batch, log_probs = make_batch(seed, spread=0.4, dtype=torch.float64)
    mask = batch["response_mask"]
    log_ratio = ragged.like(ragged.values(log_probs) - ragged.values(batch["old_log_probs"]), mask)
    rs_upper = 1.3 if rule.endswith("k1") else 0.05
    rs_lower = rs_lower if rule.endswith("k1") else None
    weights, kept, metrics = rollout_correction(
        log_ratio,
        mask,
        rollout_is=level,
        rollout_is_threshold=1.2,
        rollout_is_threshold_lower=lower,
        rollout_rs=rule,
        rollout_rs_threshold=rs_upper,
        rollout_rs_threshold_lower=rs_lower,
        rollout_token_veto_threshold=0.4,
    )
    masks = [row.bool().tolist() for row in mask.unbind()]
    bounds = {"level": level, "upper": 1.2, "lower": lower, "rule": rule, "veto": 0.4}
    rows = [row.tolist() for row in log_ratio.unbind()]
    expected_weights, expected_kept = reference(
        rows, masks, **bounds, rs_upper=rs_upper, rs_lower=1 / rs_upper if rs_lower is None else rs_lower
    )
    used = []
    for row, is_own in enumerate(masks):
        assert weights.unbind()[row].tolist() == pytest.approx(expected_weights[row], rel=1e-6)
        own = [k for k, m in zip(kept.unbind()[row].tolist(), is_own, strict=True) if m]
        expected = [k for k, m in zip(expected_kept[row], is_own, strict=True) if m]
        assert own == expected
        used.append([w * k for w, k, m in zip(expected_weights[row], expected_kept[row], is_own, strict=True) if m])
    flat = [w for row in used for w in row]
    if any(flat):
        size = sum(flat) ** 2 / sum(w * w for w in flat) / len(flat)
        assert metrics["rollout_corr/rollout_is_eff_sample_size"].item() == pytest.approx(size, rel=1e-5)
    trained_kept = [
        k for keep, own in zip(expected_kept, masks, strict=True) for k, m in zip(keep, own, strict=True) if m
    ]
    masked = 1 - sum(trained_kept) / max(1, len(trained_kept))
    assert metrics["rollout_corr/rollout_rs_masked_fraction"].item() == pytest.approx(masked if trained_kept else 0)


def test_same_policy_changes_nothing():
    batch, _ = make_batch(1)
    mask = batch["response_mask"]
    zeros = ragged.like(torch.zeros(len(ragged.values(mask))), mask)
    weights, kept, metrics = rollout_correction(
        zeros,
        mask,
        rollout_is="sequence",
        rollout_rs="seq_mean_k1",
        rollout_rs_threshold=1.001,
        rollout_token_veto_threshold=1e-4,
    )
    assert torch.equal(ragged.values(weights), ragged.values(mask))
    assert ragged.values(kept).all()
    wanted = {"kl": 0, "k3_kl": 0, "rollout_is_mean": 1, "rollout_is_max": 1, "rollout_is_min": 1}
    wanted |= {"rollout_is_eff_sample_size": 1, "rollout_rs_masked_fraction": 0, "rollout_rs_seq_masked_fraction": 0}
    assert {name: value.item() for name, value in metrics.items()} == pytest.approx(
        {f"rollout_corr/{name}": value for name, value in wanted.items()}
    )


def test_batch_without_a_trained_token_has_finite_metrics():
    nothing = ragged.ragged(torch.zeros(2), [2, 0])
    _, _, metrics = rollout_correction(nothing, nothing, rollout_is="token", rollout_token_veto_threshold=0.1)
    assert not any(value.item() for value in metrics.values())


def test_missing_log_probability_is_an_error_and_ignored_where_masked():
    mask = ragged.ragged(torch.tensor([1.0, 0.0]), [2])
    rollout_correction(ragged.like(torch.tensor([0.0, torch.nan]), mask), mask)
    with pytest.raises(ValueError, match="look for missing or infinite log-probabilities"):
        rollout_correction(ragged.like(torch.tensor([torch.nan, 0.0]), mask), mask)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rollout_is": "seq"}, "rollout_is must be token, sequence or None, got 'seq'"),
        ({"rollout_is_threshold": 2.0}, "rollout_is_threshold=2.0 has no effect without rollout_is; drop it"),
        ({"rollout_rs_threshold": 2.0}, "rollout_rs_threshold=2.0 has no effect without rollout_rs; drop it"),
        ({"rollout_is": "token", "rollout_is_threshold_lower": 3.0}, "_lower must be between 0 and rollout_is_thresh"),
        ({"rollout_is": "token", "rollout_is_threshold": math.nan}, "rollout_is_threshold must be > 0, got nan"),
        ({"rollout_rs": "token_k1", "rollout_rs_threshold": math.nan}, "rollout_rs_threshold must be > 0, got nan"),
        ({"rollout_rs": "token_k2", "rollout_rs_threshold": math.nan}, "rollout_rs_threshold must be > 0, got nan"),
        ({"rollout_rs": "seq_mean_k1"}, "requires rollout_rs_threshold"),
        ({"rollout_rs": "geometric", "rollout_rs_threshold": 1.0}, "must be one of token_k1, .*got 'geometric'"),
        (
            {"rollout_rs": "token_k2", "rollout_rs_threshold": 1.0, "rollout_rs_threshold_lower": 0.5},
            "rollout_rs_threshold_lower=0.5 has no effect with token_k2",
        ),
        ({"rollout_token_veto_threshold": 1.0}, "must be between 0 and 1, got 1.0"),
    ],
)
def test_invalid_options_are_errors(options, message):
    mask = ragged.ragged(torch.ones(1), [1])
    with pytest.raises(ValueError, match=message):
        rollout_correction(mask, mask, **options)
    with pytest.raises(ValueError, match=message):
        ActorLoss(bypass_correction=options)


BYPASS = {"rollout_is": "token", "rollout_is_threshold": 1.1, "rollout_rs": "seq_mean_k1", "rollout_rs_threshold": 1.2}


def test_bypass_mode_uses_the_rollout_policy_and_the_ratio_of_the_current_one():
    batch, log_probs = make_batch(7, num_rows=12)
    weighed, counts, mask = weigh(batch), counts_of(batch), batch["response_mask"]
    loss = ActorLoss(policy_loss="policy_gradient", bypass_correction=BYPASS)
    _, gradient, metrics = loss_and_gradient(loss, weighed, log_probs, counts)
    log_ratio = ragged.like(ragged.values(log_probs) - ragged.values(batch["rollout_log_probs"]), mask)
    weights, kept, _ = rollout_correction(log_ratio, mask, **BYPASS)
    expected = -ragged.values(batch["advantages"]) * ragged.values(weights) * ragged.values(kept)
    expected = expected * ragged.values(weighed["loss_weights"])  # the original denominators
    torch.testing.assert_close(torch.tensor([one for row in gradient for one in row]), expected)
    rejected = ((~ragged.values(kept)) * ragged.values(mask)).sum() / counts.num_tokens
    assert 0 < metrics["rollout_corr/rollout_rs_masked_fraction"] == pytest.approx(rejected.item())

    without = {name: weighed[name] for name in ("response_mask", "loss_weights", "rollout_log_probs", "advantages")}
    clipped = ActorLoss(policy_loss="vanilla", bypass_correction={})
    bypassed = loss_and_gradient(clipped, DataProto.from_dict(without), log_probs, counts)
    plain = DataProto.from_dict(without | {"old_log_probs": weighed["rollout_log_probs"]})
    assert bypassed[:2] == loss_and_gradient(ActorLoss(policy_loss="vanilla"), plain, log_probs, counts)[:2]


def test_bypass_mode_refuses_a_ratio_that_would_apply_twice():
    with pytest.raises(ValueError, match="vanilla has the ratio of the policies already"):
        ActorLoss(policy_loss="vanilla", bypass_correction=BYPASS)
    batch, log_probs = make_batch(7)
    batch.batch["rollout_is_weights"] = batch["response_mask"]
    with pytest.raises(ValueError, match="expected no column rollout_is_weights"):
        loss_and_gradient(ActorLoss(bypass_correction={}), weigh(batch), log_probs, counts_of(batch))


@pytest.mark.parametrize("threshold", [1e-4, 1e-12])
def test_veto_has_no_limit(threshold):
    mask = ragged.ragged(torch.ones(2), [1, 1])
    log_ratio = ragged.like(torch.tensor([-50.0, 0.0]), mask)
    _, kept, _ = rollout_correction(log_ratio, mask, rollout_token_veto_threshold=threshold)
    assert ragged.values(kept).tolist() == [False, True]
