"""MoE models with Megatron on GPUs: balance loss, router replay, both dispatchers, DeepSeek-V3."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_cases import VOCAB, check_training, engine_training, make_batch
from engine_cases import plain_training as plain_dense_training
from moe_cases import EXPERTS, LAYERS, TOP_K, plain_training
from tidemill_testing import run_ranks, tiny_model

pytest.importorskip("megatron.core")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.timeout(280),
]

TP, PP = "tensor_model_parallel_size", "pipeline_model_parallel_size"
EP, ETP = "expert_model_parallel_size", "expert_tensor_parallel_size"
SP, ALL = {"sequence_parallel": True}, {"moe_token_dispatcher_type": "allgather"}
Case = tuple[str, dict[str, Any]]
"""Model, and configuration of the engine."""

ON_ONE: list[Case] = [
    ("qwen3_moe", {"micro_batch_size_per_gpu": 1}),
    ("qwen3_moe", {"max_token_len_per_gpu": 30}),
    ("deepseek", {"micro_batch_size_per_gpu": 3}),
]
ON_TWO: list[Case] = [
    ("qwen3_moe", {EP: 2, "max_token_len_per_gpu": 30}),
    ("qwen3_moe", {EP: 2, **ALL, "max_token_len_per_gpu": 30}),
    ("qwen3_moe", {TP: 2, **SP}),  # experts' matrices are split, too, which gloo does not support
    ("qwen3_moe", {TP: 2, EP: 2, ETP: 1, **SP}),
    ("qwen3_moe", {TP: 2, **SP, **ALL}),
    ("qwen3_moe", {PP: 2, "max_token_len_per_gpu": 30}),
    ("deepseek", {TP: 2, EP: 2, ETP: 1, **SP, "max_token_len_per_gpu": 30}),
    ("deepseek", {PP: 2}),
]


def deepseek_batches() -> list[Any]:
    return [make_batch(7, seed=1, temperature=0.8), make_batch(6, seed=3)]


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    from megatron_cases import YARN, deepseek

    folder = tmp_path_factory.mktemp("models")
    fields: dict[str, Any] = {"num_hidden_layers": LAYERS, "num_experts": EXPERTS, "num_experts_per_tok": TOP_K}
    fields["vocab_size"] = VOCAB
    return {
        "qwen3_moe": tiny_model(folder / "qwen3_moe", "qwen3_moe", **fields, norm_topk_prob=True),
        "deepseek": deepseek(folder / "deepseek", q_lora_rank=24, n_group=4, topk_group=2, rope_parameters=YARN),
    }


@pytest.fixture(scope="module")
def references(folders) -> dict[str, Any]:
    """Training on the CPU in float32, with transformers and torch's AdamW."""
    return {
        "qwen3_moe": plain_training(folders["qwen3_moe"]),
        "deepseek": plain_dense_training(folders["deepseek"], deepseek_batches()),
    }


def train(store: str, folders: dict[str, Path], cases: list[Case]) -> list[Any]:
    import moe_cases
    from megatron_gpu_cases import join_gpus

    join_gpus(store)
    out: list[Any] = []
    for model, settings in cases:
        print(f"case {model} {settings}", file=sys.stderr, flush=True)
        settings = {**settings, "device": "cuda"}
        if model == "deepseek":
            history, weights = engine_training(folders[model], deepseek_batches(), backend="megatron", **settings)
            out.append((history, {name: weight.cpu() for name, weight in weights.items()}))
        else:
            out += moe_cases.train([(str(folders[model]), settings)])
    return out


@pytest.mark.parametrize("cases", [ON_ONE, ON_TWO], ids=["one GPU", "two GPUs"])
def test_training_on_gpus_equals_a_plain_loop(folders, references, tmp_path, cases):
    world_size = 1 if cases is ON_ONE else 2
    if torch.cuda.device_count() < world_size:
        pytest.skip(f"needs {world_size} GPUs")
    ranks = run_ranks(train, world_size, str(tmp_path / "store"), folders, cases, timeout_s=250)
    for index, (model, settings) in enumerate(cases):
        results, reference = [rank[index] for rank in ranks], references[model]
        if model == "deepseek":
            check_training(results, reference, settings, tolerance=1e-4)
            continue
        for result in results:
            for step, expected in zip(result["metrics"], reference["metrics"], strict=True):
                assert {name: step[name] for name in expected} == pytest.approx(expected, rel=1e-3, abs=1e-4), settings
            assert set(result["weights"]) == set(reference["weights"])
            for name, weight in reference["weights"].items():
                torch.testing.assert_close(
                    result["weights"][name], weight, atol=1e-4, rtol=1e-3, msg=f"{settings} {name}"
                )
            size = len({other["rank"] for other in results})
            chunks = torch.arange(len(reference["recorded"])).tensor_split(size)
            own = torch.cat([reference["recorded"][row] for row in chunks[result["rank"]].tolist()])
            assert torch.equal(result["recorded"].sort(-1).values, own.sort(-1).values.int()), settings
