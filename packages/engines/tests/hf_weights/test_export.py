"""Exported weights equal the loaded ones, by name and value, and load in transformers."""

import json
from pathlib import Path

import pytest
import torch
from engine_cases import VOCAB, build_engine, make_batch, plain_model, policy_like_loss, shard, weights_of
from safetensors.torch import load_file
from tidemill_engines.hf_weights.export import plan_shards, shard_bytes
from tidemill_testing import run_ranks, tiny_model


def run_export(path, folder, settings):
    engine = build_engine(path, **settings)
    names = [name for name, _ in engine.get_per_tensor_param()]
    rows = shard(engine, make_batch(5))
    engine.infer_batch(rows)
    loaded = weights_of(engine)
    engine.train_batch(rows, policy_like_loss, calculate_entropy=True)
    weights = weights_of(engine)
    halves = {name: weight.dtype for name, weight in engine.get_per_tensor_param("bfloat16")}
    engine.save_hf(folder / "full")
    engine.save_hf(folder / "half", dtype="bfloat16")
    for size in (20_000, "0.05MB"):  # each export replaces the previous one
        engine.save_hf(folder / f"sharded {size}", max_shard_size=size)
        engine.save_hf(folder / "again", max_shard_size=size)
    engine.save_hf(folder / "again")
    with pytest.raises(ValueError, match="max_shard_size must be bytes >= 1 or a text such as '5GB'; got '5 bytes'"):
        engine.save_hf(folder / "never", max_shard_size="5 bytes")
    engine.close()
    other = build_engine(folder / "full", backend="fsdp2" if "backend" in settings else "megatron")
    as_read = weights_of(other)
    other.close()
    assert set(as_read) == set(weights)
    assert all(torch.equal(as_read[name], weight) for name, weight in weights.items())
    return names, loaded, weights, halves


GATHERED = {"reshard_after_forward": False}
DIVIDED = {"backend": "megatron", "tensor_model_parallel_size": 2}


@pytest.mark.parametrize(
    ("family", "tied", "settings"),
    [("qwen3", True, GATHERED), ("qwen2", False, GATHERED), ("llama", False, GATHERED), ("qwen2", True, DIVIDED)],
    ids=str,
)
def test_export_is_bitwise_and_loads_in_transformers(tmp_path, family, tied, settings):
    path = tiny_model(tmp_path / "model", family, vocab_size=VOCAB, tie_word_embeddings=tied)
    (path / "tokenizer.json").write_text("{}")
    original = load_file(path / "model.safetensors")
    results = run_ranks(run_export, 2, path, tmp_path, settings)
    weights = results[0][2]
    for names, loaded, _, halves in results:
        assert sorted(names) == sorted(original)
        assert ("lm_head.weight" in names) is not tied
        assert all(torch.equal(loaded[name], original[name]) for name in names)
        assert set(halves.values()) == {torch.bfloat16}
    assert not torch.equal(weights["model.norm.weight"], original["model.norm.weight"])

    written = load_file(tmp_path / "full" / "model.safetensors")
    assert sorted(written) == sorted(original)
    assert all(torch.equal(written[name], weights[name]) for name in weights)
    model = plain_model(tmp_path / "full")
    assert all(torch.equal(weight, weights[name]) for name, weight in model.named_parameters())
    assert (tmp_path / "full" / "tokenizer.json").read_text() == "{}"
    config = json.loads((tmp_path / "full" / "config.json").read_text())
    assert config == json.loads((path / "config.json").read_text()) | {"dtype": "float32"}

    half = load_file(tmp_path / "half" / "model.safetensors")
    assert all(torch.equal(half[name], weights[name].bfloat16()) for name in weights)
    assert json.loads((tmp_path / "half" / "config.json").read_text())["dtype"] == "bfloat16"
    check_sharded(tmp_path / "sharded 20000", weights, max_bytes=20_000)
    check_sharded(tmp_path / "sharded 0.05MB", weights, max_bytes=50_000)
    assert [file.name for file in (tmp_path / "again").glob("model*")] == ["model.safetensors"]


def check_sharded(folder: Path, weights, max_bytes):
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    files = sorted(set(index["weight_map"].values()))
    assert len(files) > 2
    assert sorted(file.name for file in folder.glob("*.safetensors")) == files
    for file in files:
        tensors = load_file(folder / file)
        assert len(tensors) == 1 or sum(4 * tensor.numel() for tensor in tensors.values()) <= max_bytes
        for name, weight in tensors.items():
            assert index["weight_map"][name] == file
            assert torch.equal(weight, weights[name])
    assert sorted(index["weight_map"]) == sorted(weights)
    model = plain_model(folder)
    assert all(torch.equal(weight, weights[name]) for name, weight in model.named_parameters())


@pytest.mark.parametrize("name", ["sentencepiece.bpe.model", "tiktoken.model", "qwen.tiktoken", "tekken.json"])
def test_export_has_tokenizers_of_other_names(tmp_path, name):
    path = tiny_model(tmp_path / "model", "qwen2", vocab_size=VOCAB)
    (path / name).write_text("tokens")
    engine = build_engine(path, optimizer=False)
    engine.save_hf(tmp_path / "exported")
    engine.close()
    assert (tmp_path / "exported" / name).read_text() == "tokens"


def test_export_into_the_folder_of_the_model_replaces_its_weights(tmp_path):
    path = tiny_model(tmp_path / "model", "qwen2", vocab_size=VOCAB)
    (path / "tokenizer.json").write_text("{}")
    engine = build_engine(path, optimizer=False)
    weights = weights_of(engine)
    engine.save_hf(path, dtype="bfloat16")
    engine.close()
    written = load_file(path / "model.safetensors")
    assert all(torch.equal(written[name], weight.bfloat16()) for name, weight in weights.items())
    assert (path / "tokenizer.json").read_text() == "{}"


def test_plan_shards():
    assert plan_shards([], 10) == []
    assert plan_shards([("a", 4), ("b", 6), ("c", 1)], 10) == [["a", "b"], ["c"]]
    assert plan_shards([("a", 40), ("b", 6), ("c", 50), ("d", 1)], 10) == [["a"], ["b"], ["c"], ["d"]]


@pytest.mark.parametrize(("size", "expected"), [(7, 7), ("5GB", 5 * 10**9), ("1.5 mb", 1_500_000), ("2KB", 2000)])
def test_max_shard_size_parses_like_transformers(size, expected):
    assert shard_bytes(size) == expected


@pytest.mark.parametrize("size", [0, -1, "", "5", "GB", "5GiB", "-5GB", "0GB"])
def test_invalid_max_shard_size_is_rejected(size):
    with pytest.raises(ValueError, match="max_shard_size"):
        shard_bytes(size)
