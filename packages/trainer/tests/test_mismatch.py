import pytest
import torch
from tidemill_dataproto import DataProto, ragged
from tidemill_trainer.mismatch import MismatchError, MismatchGate


def _batch(rollout, training, mask=(1.0, 1.0, 0.0)):
    responses = ragged.ragged(torch.arange(3), [2, 1])
    values = {"rollout_log_probs": rollout, "old_log_probs": training, "response_mask": mask}
    return DataProto.from_dict({name: ragged.like(torch.tensor(value), responses) for name, value in values.items()})


FRESH = torch.zeros(2, dtype=torch.int64)


def test_differences_of_trained_tokens_are_measured():
    batch = _batch([-1.0, -2.0, 0.0], [-1.01, -2.03, -9.0])
    metrics = MismatchGate(None, ("bfloat16", "float32")).check(batch, FRESH)
    assert metrics["rollout/log_prob_abs_diff/mean"] == pytest.approx(0.02, abs=1e-6)
    assert metrics["rollout/log_prob_abs_diff/max"] == pytest.approx(0.03, abs=1e-6)


@pytest.mark.parametrize(("dtypes", "limit"), [(("float32", "float32"), 0.005), (("bfloat16", "float32"), 0.05)])
def test_first_batch_after_a_start_has_a_strict_limit_and_later_ones_four_times_as_much(dtypes, limit):
    close, apart = (_batch([-1.0, -1.0, 0.0], [-1.0 - d, -1.0 - d, 0.0]) for d in (0.9 * limit, 1.1 * limit))
    with pytest.raises(MismatchError, match="the engines do not sample from the policy that is trained"):
        MismatchGate(None, dtypes).check(apart, FRESH)
    gate = MismatchGate(None, dtypes)
    gate.check(close, FRESH)
    gate.check(apart, FRESH)
    with pytest.raises(MismatchError, match=f"more than {limit:g} "):
        gate.check(apart, FRESH, num_starts=1)
    with pytest.raises(MismatchError, match=f"more than {4 * limit:g} "):
        gate.check(_batch([-1.0, -1.0, 0.0], [-1.0 - 5 * limit] * 3), FRESH)


@pytest.mark.parametrize("wrong", [float("nan"), 0.5, float("-inf")])
def test_impossible_log_probs_are_errors_where_they_are_trained_on(wrong):
    with pytest.raises(MismatchError, match="1 of 2 log-probs of rollout are positive or not finite"):
        MismatchGate(None, ("float32",)).check(_batch([-1.0, wrong, 0.0], [-1.0, -1.0, 0.0]), FRESH)
    with pytest.raises(MismatchError, match="log-probs of training"):
        MismatchGate(None, ("float32",)).check(_batch([-1.0, -1.0, 0.0], [wrong, -1.0, 0.0]), FRESH)
    MismatchGate(None, ("float32",)).check(_batch([-1.0, -1.0, wrong], [-1.0, -1.0, wrong]), FRESH)


def test_tokens_of_older_weights_are_measured_but_have_no_limit():
    gate = MismatchGate(None, ("float32",))
    batch = _batch([-1.0, -1.0, 0.0], [-1.0, -2.0, 0.0])
    metrics = gate.check(batch, torch.tensor([0, 1]))
    assert metrics["rollout/log_prob_abs_diff/mean"] == pytest.approx(0.5)
    with pytest.raises(MismatchError, match=r"largest difference 1, 1 tokens"):
        gate.check(batch, torch.tensor([1, 0]))
    unchecked = MismatchGate(None, ("float32",))
    unchecked.check(batch, torch.tensor([2, 1]))
    with pytest.raises(MismatchError, match=r"more than 0\.005 "):  # this is the first batch with a limit
        unchecked.check(_batch([-1.0, -1.0, 0.0], [-1.0, -1.02, 0.0]), FRESH)
