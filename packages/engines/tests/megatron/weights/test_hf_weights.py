"""Loading and exporting the weights of Megatron's model on four ranks."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_cases import build_engine
from megatron_cases import check_layouts, deepseek
from safetensors.torch import load_file, save_file
from tidemill_testing import run_ranks, tiny_model

pytestmark = pytest.mark.timeout(280)

TP, PP, CP = "tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"
VPP, EP, ETP = "virtual_pipeline_model_parallel_size", "expert_model_parallel_size", "expert_tensor_parallel_size"
LAYOUTS: list[tuple[str, dict[str, Any]]] = [
    ("qwen3", {}),
    ("qwen3", {TP: 2, "sequence_parallel": True, CP: 2}),
    ("qwen3", {PP: 2, VPP: 2}),
    ("llama", {TP: 2, PP: 2}),
    ("qwen2", {TP: 2, PP: 2, "sequence_parallel": True}),
    ("qwen2", {CP: 2}),
    ("qwen3_moe", {EP: 2, PP: 2}),
    ("qwen3_moe", {TP: 2, EP: 2, ETP: 1, "sequence_parallel": True}),
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    """Models with an odd vocabulary; Qwen2's embeddings are tied."""
    folder = tmp_path_factory.mktemp("models")
    return {
        family: tiny_model(
            folder / family, family, num_hidden_layers=4, vocab_size=127, tie_word_embeddings=family == "qwen2"
        )
        for family in ("qwen2", "qwen3", "llama", "qwen3_moe")
    }


@pytest.fixture(scope="module")
def ranks(folders) -> list[tuple[dict[str, bool], list[dict[str, Any]]]]:
    """Each rank's result of `check_layouts`, for all layouts in one set of processes."""
    layouts = [(str(folders[family]), sizes) for family, sizes in LAYOUTS]
    return run_ranks(check_layouts, 4, layouts, timeout_s=250)


@pytest.fixture
def results(ranks) -> list[list[dict[str, Any]]]:
    """Each rank's result for each layout."""
    return [list(layout) for layout in zip(*(layouts for _, layouts in ranks), strict=True)]


@pytest.mark.parametrize("index", range(len(LAYOUTS)), ids=[f"{family} {sizes}" for family, sizes in LAYOUTS])
def test_exported_weights_equal_loaded_weights_bitwise(folders, results, index):
    checkpoint = load_file(folders[LAYOUTS[index][0]] / "model.safetensors")
    for rank in results[index]:
        assert set(rank["full"]) == set(checkpoint)
        assert all(torch.equal(rank["full"][name], tensor) for name, tensor in checkpoint.items())
        assert rank["read"] <= rank["held"]
        assert rank["sizes"] == [(name, weight.nbytes) for name, weight in rank["full"].items()]


@pytest.mark.parametrize("index", range(len(LAYOUTS)), ids=[f"{family} {sizes}" for family, sizes in LAYOUTS])
def test_first_replicas_of_all_shards_cover_the_checkpoint_once(folders, results, index):
    checkpoint = load_file(folders[LAYOUTS[index][0]] / "model.safetensors")
    counts = {name: torch.zeros(tensor.shape) for name, tensor in checkpoint.items()}
    for name, shard in (item for rank in results[index] for item in rank["shards"]):
        assert shard.global_shape == tuple(checkpoint[name].shape)
        ends = zip(shard.start, shard.tensor.shape, strict=True)
        region = tuple(slice(start, start + size) for start, size in ends)
        assert torch.equal(checkpoint[name][region], shard.tensor)
        assert 0 <= shard.replica < shard.num_replicas
        counts[name][region] += 1 if shard.replica == 0 else 0
    assert all(bool((count == 1).all()) for count in counts.values())
    assert all(rank["are_views"] for rank in results[index])


def test_export_gathers_each_tensor_once(folders, tmp_path):
    engine = build_engine(folders["qwen2"], backend="megatron", optimizer=False)
    gathered, full_tensors = [], engine.weights.full_tensors

    def counted(dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
        for name, weight in full_tensors(dtype):
            gathered.append(name)
            yield name, weight

    engine.weights.full_tensors = counted
    engine.save_hf(tmp_path, "bfloat16", max_shard_size=100_000)
    engine.close()
    checkpoint = load_file(folders["qwen2"] / "model.safetensors")
    assert sorted(gathered) == sorted(checkpoint)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(2 * weight.numel() for weight in checkpoint.values())
    for file in set(index["weight_map"].values()):
        for name, weight in load_file(tmp_path / file).items():
            assert torch.equal(weight, checkpoint[name].bfloat16())


def test_megatron_core_is_unpatched_after_the_last_context(ranks):
    for states, _ in ranks:
        assert states == {"in one": True, "in second": True, "after both": False}


def _exported_bias(backend: str, path: str, folder: Path) -> dict[str, torch.Tensor]:
    settings: dict[str, Any] = {"param_dtype": "bfloat16", "optimizer": False}
    if backend == "fsdp2":
        settings["model"] = {"dtype": "bfloat16"}
    engine = build_engine(path, backend=backend, **settings)
    found = {name: tensor for name, tensor in engine.get_per_tensor_param() if name.endswith("e_score_correction_bias")}
    engine.save_hf(folder / backend)
    engine.close()
    return found


@pytest.mark.parametrize("backend", ["fsdp2", "megatron"])
def test_biases_of_routers_are_not_rounded(tmp_path, backend):
    path = deepseek(tmp_path / "model", n_group=1, topk_group=1)
    file = path / "model.safetensors"
    weights = load_file(file)
    biases = {
        name: 4 + 0.02 * torch.rand(tensor.shape, generator=torch.Generator().manual_seed(1))
        for name, tensor in weights.items()
        if name.endswith("e_score_correction_bias")
    }
    save_file(weights | biases, file, metadata={"format": "pt"})
    [found] = run_ranks(_exported_bias, 1, backend, str(path), tmp_path)
    saved = load_file(tmp_path / backend / "model.safetensors")
    assert biases.keys() == found.keys()
    for name, bias in biases.items():
        assert torch.equal(found[name], bias)
        assert torch.equal(saved[name], bias)
    assert saved["model.embed_tokens.weight"].dtype == torch.bfloat16
