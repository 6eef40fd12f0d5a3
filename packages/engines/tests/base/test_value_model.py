"""A value head on any causal language model, against transformers' models for token classification."""

import json

import pytest
import torch
from engine_cases import OPTIMIZER, VOCAB, checkpoint_weights, full, make_batch, relative_error, shard, weights_of
from safetensors.torch import load_file, save_file
from tidemill_dataproto import ragged
from tidemill_testing import run_ranks, tiny_model


def value_engine(path, *, backend="fsdp2", device="cpu", **engine):
    from tidemill_engines import EngineRegistry, FSDP2Config, ModelConfig, OptimizerConfig
    from tidemill_engines.megatron.config import MegatronConfig

    config = FSDP2Config if backend == "fsdp2" else MegatronConfig
    new = EngineRegistry.new(
        model_type="value_model",
        backend=backend,
        model=ModelConfig(path=str(path)),
        engine=config(device=device, **engine),
        optimizer=OptimizerConfig(**OPTIMIZER),
    )
    new.initialize()
    return new


def value_loss(output, micro_batch, normalizer):
    mask = ragged.values(micro_batch["response_mask"]).to(output.values.dtype)
    error = (output.values - ragged.values(micro_batch["advantages"])).square()
    return (error * mask).sum() / normalizer.num_tokens, {"value": (output.values * mask).sum() / normalizer.num_tokens}


def plain_value_training(path, batches):
    """Values of the last batch before training, then metrics and weights, from plain transformers, row by row."""
    import transformers

    transformers.utils.logging.disable_progress_bar()
    load = transformers.AutoModelForTokenClassification.from_pretrained
    model = load(path, dtype=torch.float32, attn_implementation="eager").eval()
    settings = {name: value for name, value in OPTIMIZER.items() if name != "clip_grad"}
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False, **settings)

    def values_of(batch):
        rows = zip(batch["input_ids"].unbind(), batch["responses"].unbind(), strict=True)
        return [model(input_ids=ids[None]).logits[0, len(ids) - len(r) - 1 : -1, 0][: len(r)] for ids, r in rows]

    with torch.no_grad():
        before = torch.cat(values_of(batches[-1]))
    history = []
    for batch in batches:
        mask = ragged.values(batch["response_mask"]).float()
        values = torch.cat(values_of(batch))
        loss = ((values - ragged.values(batch["advantages"])).square() * mask).sum() / mask.sum()
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), OPTIMIZER["clip_grad"])
        optimizer.step()
        mean = (values * mask).sum() / mask.sum()
        history.append({"loss": loss.item(), "grad_norm": norm.item(), "value": mean.item()})
    return before, history, checkpoint_weights(model)


def with_value_head(source, target):
    """The checkpoint as one of a model for token classification, with a random head."""
    import shutil

    shutil.copytree(source, target)
    tensors = load_file(source / "model.safetensors")
    tensors.pop("lm_head.weight", None)
    generator = torch.Generator().manual_seed(0)
    tensors |= {"score.weight": torch.randn(1, 64, generator=generator), "score.bias": torch.tensor([0.3])}
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((target / "config.json").read_text())
    config |= {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}, "classifier_dropout": 0.0}
    (target / "config.json").write_text(json.dumps(config))
    return target


def run_values(path, batches, layouts):
    out = []
    for layout in layouts:
        engine = value_engine(path, **layout)
        rows = [shard(engine, batch) for batch in batches]
        values = engine.infer_batch(rows[-1])
        assert list(values.batch.keys()) == ["values"]
        history = [engine.train_batch(batch, value_loss) for batch in rows]
        out.append((engine.get_data_parallel_rank(), ragged.values(values["values"]), history, weights_of(engine)))
        engine.close()
    return out


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
def test_a_new_head_starts_at_zero_learns_and_is_exported_for_transformers(tmp_path, layout):
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
