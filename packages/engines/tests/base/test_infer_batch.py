"""infer_batch against transformers, row by row."""

import pytest
import torch
from engine_cases import VOCAB, build_engine, make_batch, plain_log_probs, plain_model, policy_like_loss, shard
from tidemill_testing import run_ranks, tiny_model


def run_infer(path, batch, layouts):
    out = []
    for layout in layouts:
        engine = build_engine(path, optimizer=False, **layout)
        result = engine.infer_batch(shard(engine, batch), entropy=True)
        plain = engine.infer_batch(shard(engine, batch))
        assert list(plain.batch.keys()) == ["log_probs"]
        out.append(([*result["log_probs"].unbind()], [*result["entropy"].unbind()]))
        engine.close()
    return out


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_log_probs_and_entropy_equal_transformers_in_row_order(tmp_path, temperature):
    path = tiny_model(tmp_path / "model", "qwen3", vocab_size=VOCAB)
    batch = make_batch(15, seed=7, temperature=temperature)
    layouts = [{}, {"max_token_len_per_gpu": 24}, {"micro_batch_size_per_gpu": 2, "reshard_after_forward": False}]
    with torch.no_grad():
        expected = plain_log_probs(plain_model(path), batch)
    results = run_ranks(run_infer, 2, path, batch, layouts)
    for number in range(len(layouts)):
        log_probs = [row for of_rank in results for row in of_rank[number][0]]
        entropy = [row for of_rank in results for row in of_rank[number][1]]
        assert len(log_probs) == len(expected)
        for row, (expected_log_probs, expected_entropy) in enumerate(expected):
            torch.testing.assert_close(log_probs[row], expected_log_probs, rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(entropy[row], expected_entropy, rtol=1e-5, atol=1e-5)


def run_rank_without_rows(path, batch):
    engine = build_engine(path)
    rows = batch[0:1] if engine.get_data_parallel_rank() == 0 else batch[0:0]
    out = engine.infer_batch(rows)
    assert len(engine.infer_batch(batch[0:0])) == 0
    engine.close()
    return len(out), out["log_probs"].values()


def test_rank_without_rows_participates(tmp_path):
    path = tiny_model(tmp_path / "model", "qwen3", vocab_size=VOCAB)
    (rows, log_probs), (no_rows, nothing) = run_ranks(run_rank_without_rows, 2, path, make_batch(2, seed=8))
    assert (rows, no_rows, nothing.numel()) == (1, 0, 0)
    assert torch.isfinite(log_probs).all()


def test_runs_without_launcher_and_restores_mode(tmp_path, monkeypatch):
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    path = tiny_model(tmp_path / "model", "qwen3", vocab_size=VOCAB)
    batch = make_batch(3, seed=9)
    engine = build_engine(path)
    try:
        assert (engine.get_data_parallel_rank(), engine.get_data_parallel_size()) == (0, 1)
        assert engine.is_mp_src_rank_with_outputs()
        before = engine.infer_batch(batch)["log_probs"].values()
        with engine.train_mode():
            engine.infer_batch(batch)
            assert engine.model.training
        assert not engine.model.training
        engine.train_batch(batch, policy_like_loss, calculate_entropy=True)
        assert not engine.model.training
        assert not torch.equal(engine.infer_batch(batch)["log_probs"].values(), before)
        assert torch.is_grad_enabled()
    finally:
        engine.close()
    assert not torch.distributed.is_initialized()
    engine.close()
    engine.initialize()  # again, from the checkpoint
    torch.testing.assert_close(engine.infer_batch(batch)["log_probs"].values(), before)
    engine.close()


def run_two_engines(path, batch):
    actor, reference = build_engine(path), build_engine(path, optimizer=False)
    rows = shard(actor, batch)
    before = reference.infer_batch(rows)["log_probs"].values()
    actor.train_batch(rows, policy_like_loss, calculate_entropy=True)
    unchanged = torch.equal(reference.infer_batch(rows)["log_probs"].values(), before)
    moved = not torch.equal(actor.infer_batch(rows)["log_probs"].values(), before)
    actor.close()
    return unchanged and moved and torch.equal(reference.infer_batch(rows)["log_probs"].values(), before)


def test_two_engines_in_one_process_do_not_share_state(tmp_path):
    path = tiny_model(tmp_path / "model", "qwen3", vocab_size=VOCAB)
    assert run_ranks(run_two_engines, 2, path, make_batch(6, seed=10)) == [True, True]
