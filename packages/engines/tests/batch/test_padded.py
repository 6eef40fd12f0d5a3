"""Padded batches give the results of the equal ragged batches, in padded layout."""

import pytest
import torch
from engine_cases import VOCAB, build_engine, make_batch, pad_batch, policy_like_loss
from tidemill_dataproto import ragged
from tidemill_engines.batch.padded import is_padded, to_padded, to_ragged
from tidemill_testing import tiny_model


@pytest.mark.parametrize("num_rows", [0, 1, 9])
def test_padded_batch_converts_to_ragged(num_rows):
    batch = make_batch(num_rows, seed=1, temperature=0.9)
    padded = pad_batch(batch)
    assert is_padded(padded)
    assert not is_padded(batch)
    actual = to_ragged(padded)
    for name in ("input_ids", "responses", "response_mask", "advantages"):
        assert torch.equal(ragged.values(actual[name]), ragged.values(batch[name])), name
        assert torch.equal(ragged.lengths(actual[name]), ragged.lengths(batch[name])), name
    assert actual["per_row"].shape == (num_rows,)
    assert actual.meta_info == batch.meta_info
    assert "attention_mask" in padded.batch.keys()  # noqa: SIM118 - the batch of the caller is as it was
    mask = padded["attention_mask"][:, 12:]
    assert torch.equal(to_padded(batch["advantages"], mask), padded["advantages"].nan_to_num(0.0))


def test_padded_and_ragged_batches_give_equal_results(tmp_path, monkeypatch):
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    path = tiny_model(tmp_path / "model", "qwen3", vocab_size=VOCAB)
    batch = make_batch(9, seed=2, temperature=0.9)
    padded = pad_batch(batch)
    engine = build_engine(path, max_token_len_per_gpu=40)
    expected = engine.infer_batch(batch, entropy=True)
    actual = engine.infer_batch(padded, entropy=True)
    for name in ("log_probs", "entropy"):
        assert actual[name].shape == padded["responses"].shape
        assert torch.equal(actual[name], ragged.to_padded(expected[name], 0.0, max_len=11))
    trained = engine.train_batch(padded, policy_like_loss, calculate_entropy=True)
    engine.close()
    other = build_engine(path, max_token_len_per_gpu=40)
    assert other.train_batch(batch, policy_like_loss, calculate_entropy=True) == trained
    without_mask = padded.select([name for name in padded.batch.keys() if name != "attention_mask"])  # noqa: SIM118
    with pytest.raises(TypeError, match=r"input_ids must be ragged.*pass all columns padded"):
        other.infer_batch(without_mask)
    for name, column in (("responses", padded["input_ids"]), ("attention_mask", padded["responses"])):
        wrong = padded.clone()
        wrong.batch[name] = column
        with pytest.raises(ValueError, match=r"(expected|must be) .*; got input_ids \(9, 23\)"):
            other.infer_batch(wrong)
    other.close()
