"""Weights out equal weights in: by name, by value, and through transformers."""

import json
from pathlib import Path

import pytest
import torch
from engine_cases import VOCAB, build_engine, make_batch, plain_model, policy_like_loss, shard, weights_of
from safetensors.torch import load_file
from tidemill_engines.hf_export import plan_shards, write_weights
from tidemill_testing import run_ranks, tiny_model


def run_export(path, folder):
    engine = build_engine(path, reshard_after_forward=False)
    names = [name for name, _ in engine.get_per_tensor_param()]
    rows = shard(engine, make_batch(5))
    engine.infer_batch(rows)
    loaded = weights_of(engine)
    engine.train_batch(rows, policy_like_loss, calculate_entropy=True)
    weights = weights_of(engine)
    halves = {name: weight.dtype for name, weight in engine.get_per_tensor_param("bfloat16")}
    engine.save_hf(folder / "full")
    engine.save_hf(folder / "half", dtype="bfloat16")
    (folder / "sharded").mkdir(exist_ok=True)
    group = engine.get_data_parallel_group()
    write_weights(engine.get_per_tensor_param, folder / "sharded", group, max_shard_bytes=20_000)
    engine.close()
    return names, loaded, weights, halves


@pytest.mark.parametrize(("family", "tied"), [("qwen3", True), ("qwen2", False), ("llama", False)])
def test_export(tmp_path, family, tied):
    path = tiny_model(tmp_path / "model", family, vocab_size=VOCAB, tie_word_embeddings=tied)
    (path / "tokenizer.json").write_text("{}")
    original = load_file(path / "model.safetensors")
    results = run_ranks(run_export, 2, path, tmp_path)
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
    assert config["dtype"] == "float32"
    assert "tidemill" not in json.dumps(config)

    half = load_file(tmp_path / "half" / "model.safetensors")
    assert all(torch.equal(half[name], weights[name].bfloat16()) for name in weights)
    assert json.loads((tmp_path / "half" / "config.json").read_text())["dtype"] == "bfloat16"
    check_sharded(tmp_path / "sharded", weights)


def check_sharded(folder: Path, weights):
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    files = sorted(set(index["weight_map"].values()))
    assert len(files) > 2
    assert sorted(file.name for file in folder.glob("*.safetensors")) == files
    for file in files:
        for name, weight in load_file(folder / file).items():
            assert index["weight_map"][name] == file
            assert torch.equal(weight, weights[name])
    assert sorted(index["weight_map"]) == sorted(weights)


def test_plan_shards():
    assert plan_shards([], 10) == []
    assert plan_shards([("a", 4), ("b", 6), ("c", 1)], 10) == [["a", "b"], ["c"]]
    assert plan_shards([("a", 40), ("b", 6), ("c", 50), ("d", 1)], 10) == [["a"], ["b"], ["c"], ["d"]]
