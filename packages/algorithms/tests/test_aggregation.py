import pytest
import torch
from loss_cases import make_batch, weigh
from tidemill_algorithms import token_weights
from tidemill_dataproto import ragged

MODES = ["token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm", "seq-mean-token-mean", "prompt-mean"]
MASK = ragged.ragged(torch.tensor([1.0, 1, 0, 1, 1, 1]), [3, 3])
VALUES = torch.tensor([1.0, 2, 3, 4, 5, 6])


@pytest.mark.parametrize(
    ("mode", "options", "expected"),
    [
        ("token-mean", {}, 3.6),
        ("seq-mean-token-sum", {}, 9.0),
        ("seq-mean-token-sum-norm", {"loss_scale_factor": 6.0}, 1.5),
        ("seq-mean-token-mean", {}, 3.25),
        ("prompt-mean", {"uid": ["a", "b"]}, 3.25),
        ("prompt-mean", {"uid": ["a", "a"]}, 3.6),
    ],
)
def test_known_numbers(mode, options, expected):
    assert (VALUES * ragged.values(token_weights(MASK, mode, **options))).sum().item() == pytest.approx(expected)


def plain_weights(mask_rows, mode, uid, kept_rows, denominator):
    """Compute the weights of each row in float64, row by row."""
    kept_rows = [[m * k for m, k in zip(*rows, strict=True)] for rows in zip(mask_rows, kept_rows, strict=True)]
    counted = [sum(row) for row in (kept_rows if denominator == "kept" else mask_rows)]
    of_prompt = {name: sum(c for c, u in zip(counted, uid, strict=True) if u == name) for name in uid}
    sequences, prompts = sum(c > 0 for c in counted), sum(c > 0 for c in of_prompt.values())
    divisors = {
        "token-mean": [sum(counted)] * len(uid),
        "seq-mean-token-sum": [sequences] * len(uid),
        "seq-mean-token-sum-norm": [sequences * 7.0] * len(uid),
        "seq-mean-token-mean": [c * sequences for c in counted],
        "prompt-mean": [of_prompt[u] * prompts for u in uid],
    }[mode]
    return [[k / (d or 1) for k in row] for row, d in zip(kept_rows, divisors, strict=True)]


@pytest.mark.parametrize("denominator", ["original", "kept"])
@pytest.mark.parametrize("mode", MODES)
def test_weights_equal_a_plain_computation_with_rejected_tokens(mode, denominator):
    for seed in range(6):
        batch, _ = make_batch(seed, num_rows=8)
        kept = (
            torch.rand(len(ragged.values(batch["response_mask"])), generator=torch.Generator().manual_seed(seed)) > 0.4
        )
        kept = ragged.like(kept, batch["response_mask"])
        rows = [row.double().tolist() for row in batch["response_mask"].unbind()]
        kept_rows = [row.double().tolist() for row in kept.unbind()]
        expected = plain_weights(rows, mode, batch.non_tensor_batch["uid"], kept_rows, denominator)
        actual = weigh(batch, mode, kept=kept, denominator=denominator)["loss_weights"]
        for own, plain in zip(actual.unbind(), expected, strict=True):
            assert own.tolist() == pytest.approx(plain, rel=1e-6)


@pytest.mark.parametrize("mode", MODES)
def test_batch_without_a_trained_token_has_weights_of_zero(mode):
    batch, _ = make_batch(0, num_rows=2)
    assert not ragged.values(weigh(batch, mode)["loss_weights"]).any()


@pytest.mark.parametrize(
    ("mode", "options", "message"),
    [
        ("mean", {}, r"must be one of token-mean, .*, got 'mean'"),
        ("seq-mean-token-sum-norm", {}, "requires a constant loss_scale_factor"),
        ("token-mean", {"loss_scale_factor": 2.0}, "loss_scale_factor=2.0 has no effect with token-mean"),
        ("prompt-mean", {}, "prompt-mean requires `uid`"),
        ("token-mean", {"denominator": "kept"}, 'denominator="kept" requires `kept`'),
        ("token-mean", {"denominator": "all"}, "denominator must be"),
    ],
)
def test_invalid_arguments_are_errors(mode, options, message):
    with pytest.raises(ValueError, match=message):
        token_weights(MASK, mode, **options)


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean", "prompt-mean"])
def test_weights_of_a_mean_add_up_to_one_also_for_fractions(mode):
    mask = ragged.ragged(torch.tensor([0.25, 0.25, 0.0]), [3])
    options = {"uid": ["a"]} if mode == "prompt-mean" else {}
    assert ragged.values(token_weights(mask, mode, **options)).tolist() == [0.5, 0.5, 0.0]
