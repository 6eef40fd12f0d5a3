"""Most probable ids, and log-probabilities of given ids with their gradient, against transformers, in any layout."""

import pytest
import torch
from engine_cases import (
    VOCAB,
    build_engine,
    check_training,
    checkpoint_weights,
    make_batch,
    pad_batch,
    plain_distributions,
    plain_model,
    shard,
    weights_of,
)
from tidemill_dataproto import DataProto, ragged
from tidemill_testing import run_ranks, tiny_model

K = 5
OPTIMIZER = {"lr": 1e-2, "eps": 1e-3, "weight_decay": 0.0, "clip_grad": 1e9}
LAYOUTS = {
    ("fsdp2", 1): [{}, {"micro_batch_size_per_gpu": 2}],
    ("fsdp2", 2): [{"max_token_len_per_gpu": 30}, {"max_token_len_per_gpu": 30, "ulysses_sequence_parallel_size": 2}],
    ("megatron", 2): [
        {"max_token_len_per_gpu": 40, "tensor_model_parallel_size": 2},
        {"max_token_len_per_gpu": 40, "tensor_model_parallel_size": 2, "sequence_parallel": True},
        {"max_token_len_per_gpu": 40, "context_parallel_size": 2},
        {"max_token_len_per_gpu": 40, "pipeline_model_parallel_size": 2},
    ],
}


def with_topk(batch, teacher):
    """Add the columns `topk_ids` of another model and `weights`, its probabilities of them."""
    with torch.no_grad():
        log_probs, ids = torch.cat(plain_distributions(teacher, batch)).topk(K)
    return batch.union(
        DataProto.from_dict(
            {
                "topk_ids": ragged.like(ids.int(), batch["responses"]),
                "weights": ragged.like(log_probs.exp(), batch["responses"]),
            }
        )
    )


def topk_loss(output, micro_batch, normalizer):
    """Cross entropy with the weights, plus a term of the sampled tokens."""
    mask = ragged.values(micro_batch["response_mask"]).to(output.log_probs.dtype)
    terms = (output.topk_log_probs * ragged.values(micro_batch["weights"])).sum(-1) + 0.1 * output.log_probs
    return -(terms * mask).sum() / normalizer.num_tokens, {}


def plain_step(model, batch):
    """Train one step; return metrics and weights as an engine."""
    rows = plain_distributions(model, batch)
    mask = ragged.values(batch["response_mask"]).float()
    topk = torch.cat(rows).gather(-1, ragged.values(batch["topk_ids"]).long())
    labels = torch.cat(rows).gather(-1, ragged.values(batch["responses"]).unsqueeze(-1)).squeeze(-1)
    loss = -(((topk * ragged.values(batch["weights"])).sum(-1) + 0.1 * labels) * mask).sum() / mask.sum()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3, weight_decay=0.0, foreach=False)
    loss.backward()
    norm = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]).norm()
    optimizer.step()
    return [{"loss": loss.item(), "grad_norm": norm.item()}], checkpoint_weights(model), topk.detach()


def run_layouts(backend, path, batch, layouts):
    out = []
    for layout in layouts:
        engine = build_engine(path, backend=backend, optimizer=OPTIMIZER, **layout)
        rows = shard(engine, batch)
        probable = engine.infer_batch(rows.select(["input_ids", "responses"]), top_k=K)
        assert probable["topk_ids"].dtype == torch.int32
        given = engine.infer_batch(rows)
        history = [engine.train_batch(rows, topk_loss)]
        columns = [probable["topk_ids"], probable["topk_log_probs"], given["topk_ids"], given["topk_log_probs"]]
        part = (engine.get_data_parallel_rank(), [ragged.values(column) for column in columns])
        out.append((part, (history, weights_of(engine))))
        engine.close()
    return out


@pytest.mark.parametrize(("backend", "world_size"), LAYOUTS)
def test_topk_and_its_gradient_do_not_depend_on_layout(tmp_path, backend, world_size):
    if backend == "megatron":
        pytest.importorskip("megatron.core")
    path = tiny_model(tmp_path / "model", "qwen3", vocab_size=VOCAB)
    teacher = plain_model(tiny_model(tmp_path / "teacher", "llama", vocab_size=VOCAB))
    model = plain_model(path)
    batch = with_topk(make_batch(9, seed=1, temperature=0.7), teacher)
    with torch.no_grad():
        log_probs, ids = torch.cat(plain_distributions(model, batch)).topk(K)
    history, weights, given = plain_step(model, batch)
    layouts = LAYOUTS[backend, world_size]
    results = run_ranks(run_layouts, world_size, backend, path, batch, layouts, timeout_s=250.0)
    for number, layout in enumerate(layouts):
        parts, trained = zip(*(of_rank[number] for of_rank in results), strict=True)
        by_part = dict(parts)
        actual = [torch.cat([by_part[part][i] for part in sorted(by_part)]) for i in range(4)]
        assert torch.equal(actual[0].long(), ids), layout
        torch.testing.assert_close(actual[1], log_probs, rtol=1e-5, atol=1e-5)
        assert torch.equal(actual[2], ragged.values(batch["topk_ids"])), layout
        torch.testing.assert_close(actual[3], given, rtol=1e-5, atol=1e-5)
        check_training(trained, (history, weights), layout)


def test_padded_batches_return_padded_topk(tmp_path, monkeypatch):
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    path = tiny_model(tmp_path / "model", "qwen3", vocab_size=VOCAB)
    batch = make_batch(4, seed=2)
    engine = build_engine(path, optimizer=False)
    expected, padded = engine.infer_batch(batch, top_k=3), engine.infer_batch(pad_batch(batch), top_k=3)
    mask = pad_batch(batch)["attention_mask"][:, -11:]
    for name in ("topk_ids", "topk_log_probs"):
        assert padded[name].shape == (4, 11, 3)
        torch.testing.assert_close(ragged.values(ragged.from_padded(padded[name], mask)), expected[name].values())
    engine.close()


def test_invalid_requests_are_refused(tmp_path, monkeypatch):
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    path = tiny_model(tmp_path / "model", "qwen3", vocab_size=VOCAB)
    batch = make_batch(3, seed=2)
    flat = ragged.values(batch["responses"])

    def with_ids(ids, like="responses"):
        return batch.union(DataProto.from_dict({"topk_ids": ragged.like(ids, batch[like])}))

    engine = build_engine(path, optimizer=False)
    for k in (0, VOCAB + 1):
        with pytest.raises(
            ValueError, match=f"top_k must be between 1 and the size of the vocabulary, {VOCAB}; got {k}"
        ):
            engine.infer_batch(batch, top_k=k)
    with pytest.raises(ValueError, match="has a column topk_ids; drop one of them"):
        engine.infer_batch(with_ids(flat[:, None]), top_k=2)
    with pytest.raises(ValueError, match=r"topk_ids must have k ids for each response token, \[B, j, k\]"):
        engine.infer_batch(with_ids(flat))
    with pytest.raises(ValueError, match="ragged like responses"):
        engine.infer_batch(with_ids(ragged.values(batch["input_ids"])[:, None], like="input_ids"))
    with pytest.raises(TypeError, match="topk_ids must be int32 or int64 token ids, got torch"):
        engine.infer_batch(with_ids(flat[:, None].float()))
    with pytest.raises(ValueError, match=f"vocabulary of {VOCAB}, got .* to {VOCAB}; take them from a model with"):
        engine.infer_batch(with_ids(torch.full((len(flat), 1), VOCAB)))
    assert "topk_ids" not in engine.infer_batch(batch)
    engine.close()
    values = build_engine(path, model_type="value_model", optimizer=False)
    with pytest.raises(ValueError, match="a value model predicts no tokens"):
        values.infer_batch(batch, top_k=2)
    values.close()
