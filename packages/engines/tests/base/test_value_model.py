"""A value head on any causal language model, against transformers' models for token classification."""

import pytest
import torch
from engine_cases import VOCAB, full, make_batch, relative_error
from tidemill_dataproto import ragged
from tidemill_testing import run_ranks, tiny_model
from value_cases import plain_value_training, run_values, value_engine, value_loss, with_value_head

TP, PP, CP = "tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"
FSDP2 = [
    {"max_token_len_per_gpu": 40},
    {"micro_batch_size_per_gpu": 1, "fsdp_size": 1, "reshard_after_forward": False},
]
MEGATRON = [
    {TP: 2, PP: 2, "sequence_parallel": True, "max_token_len_per_gpu": 40},
    {TP: 2, CP: 2, "overlap_grad_reduce": True, "overlap_param_gather": True},
    {PP: 2, "virtual_pipeline_model_parallel_size": 2, "micro_batch_size_per_gpu": 1},
]


@pytest.mark.parametrize(
    ("family", "tied", "num_ranks", "layouts"),
    [
        ("qwen3", True, 2, FSDP2),
        ("llama", False, 2, FSDP2),
        ("qwen3_moe", False, 2, [{"backend": "megatron", "expert_model_parallel_size": 2}]),
        pytest.param(
            *("qwen3", True, 4, [{"backend": "megatron", **layout} for layout in MEGATRON]), marks=pytest.mark.slow
        ),
    ],
)
def test_values_and_training_equal_transformers(tmp_path, family, tied, num_ranks, layouts):
    source = tiny_model(tmp_path / "model", family, num_hidden_layers=4, vocab_size=VOCAB, tie_word_embeddings=tied)
    path = with_value_head(source, tmp_path / "valued")
    batches = [make_batch(9, seed=1), make_batch(5, seed=2), make_batch(8, seed=3)]
    values, history, weights = plain_value_training(path, batches)
    results = run_ranks(run_values, num_ranks, path, batches, layouts, timeout_s=250)
    for of_ranks in zip(*results, strict=True):
        parts = {part: own for part, own, _, _ in of_ranks}
        torch.testing.assert_close(torch.cat([parts[part] for part in sorted(parts)]), values, rtol=1e-4, atol=1e-5)
        for _, _, actual_history, actual_weights in of_ranks:
            for actual, expected in zip(actual_history, history, strict=True):
                assert {name: actual[name] for name in expected} == pytest.approx(expected, rel=1e-4, abs=1e-6)
            assert sorted(actual_weights) == sorted(weights)
            for name, weight in weights.items():
                assert relative_error(actual_weights[name], weight) < 1e-4, name


def run_new_head(path, folder, batch, layout):
    engine = value_engine(path, **layout)
    zero = ragged.values(engine.infer_batch(batch)["values"])
    head = full(dict(engine.get_per_tensor_param())["score.weight"]).clone()
    for _ in range(2):
        metrics = engine.train_batch(batch, value_loss)
    with pytest.raises(ValueError, match="has no entropy"):
        engine.train_batch(batch, value_loss, calculate_entropy=True)
    values = ragged.values(engine.infer_batch(batch)["values"])
    engine.save_hf(folder / "trained")
    engine.save_checkpoint(folder / "checkpoint")
    engine.close()
    again = value_engine(folder / "trained", backend=layout.get("backend", "fsdp2"))
    again.load_checkpoint(folder / "checkpoint")
    again.close()
    return zero, head, metrics, values


@pytest.mark.parametrize("layout", [{"ulysses_sequence_parallel_size": 2}, {"backend": "megatron", PP: 2}])
def test_new_head_starts_at_zero_and_export_loads_in_transformers(tmp_path, layout):
    import transformers

    path = tiny_model(tmp_path / "model", "qwen3", vocab_size=VOCAB, tie_word_embeddings=False)
    batch = make_batch(6, seed=4)
    for zero, head, metrics, values in run_ranks(run_new_head, 2, path, tmp_path, batch, layout, timeout_s=250):
        assert not zero.any()
        assert not head.any()
        assert metrics["grad_norm"] > 0
        assert values.any()
    config = transformers.AutoConfig.from_pretrained(tmp_path / "trained")
    assert (config.architectures, config.num_labels) == (["Qwen3ForTokenClassification"], 1)
    before, _, _ = plain_value_training(tmp_path / "trained", [batch])
    torch.testing.assert_close(before, values, rtol=1e-4, atol=1e-5)
