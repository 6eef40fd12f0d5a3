"""The Megatron engine on four ranks against a plain loop of PyTorch."""

from pathlib import Path
from typing import Any

import pytest
import torch
from engine_cases import VOCAB, make_batch, plain_log_probs, plain_policy_like_loss
from megatron_cases import NUM_ROWS, OPTIMIZER, train
from tidemill_testing import run_ranks, tiny_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(280)]

TP, PP, CP = "tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"
VPP, EP, ETP = "virtual_pipeline_model_parallel_size", "expert_model_parallel_size", "expert_tensor_parallel_size"
SP = {"sequence_parallel": True}
CASES: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("qwen3", {}, {"use_distributed_optimizer": False}),
    ("qwen3", {}, {"overlap_grad_reduce": True, "max_token_len_per_gpu": 30}),
    ("qwen3", {TP: 2, CP: 2, **SP}, {"micro_batch_size_per_gpu": 3}),
    ("qwen3", {PP: 2, VPP: 2}, {"micro_batch_size_per_gpu": 1}),
    ("llama", {TP: 2, PP: 2, "num_layers_in_last_pipeline_stage": 1}, {"max_token_len_per_gpu": 20}),
    ("qwen2", {TP: 2, PP: 2, **SP}, {"use_distributed_optimizer": False}),
    ("qwen2", {CP: 2}, {}),
    ("qwen3_moe", {EP: 2, PP: 2}, {"micro_batch_size_per_gpu": 3}),
    ("qwen3_moe", {TP: 2, EP: 2, ETP: 1, **SP}, {}),
]
IDS = [f"{family} {sizes} {others}" for family, sizes, others in CASES]
NUM_STEPS = 3


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {
        family: tiny_model(
            folder / family, family, num_hidden_layers=4, vocab_size=VOCAB, tie_word_embeddings=family == "qwen2"
        )
        for family in ("qwen2", "qwen3", "llama", "qwen3_moe")
    }


@pytest.fixture(scope="module")
def ranks(folders) -> list[list[dict[str, Any]]]:
    """What each rank saw: one set of processes for all cases, as importing Megatron takes long."""
    return run_ranks(
        train, 4, [(str(folders[f]), sizes, others) for f, sizes, others in CASES], NUM_STEPS, timeout_s=250
    )


@pytest.fixture(scope="module")
def references(folders) -> dict[str, dict[str, Any]]:
    """The same steps with transformers and torch's AdamW."""
    return {family: _reference(folder) for family, folder in folders.items()}


def _reference(folder: Path) -> dict[str, Any]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    batch = make_batch(NUM_ROWS, temperature=0.8)
    with torch.no_grad():
        rows = plain_log_probs(model, batch)
    matrices = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() == 1]
    settings = {"lr": OPTIMIZER["lr"], "eps": OPTIMIZER["eps"], "betas": (0.9, 0.999)}
    groups = [
        {"params": matrices, "weight_decay": OPTIMIZER["weight_decay"]},
        {"params": others, "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, **settings)
    metrics = []
    for _ in range(NUM_STEPS):
        optimizer.zero_grad()
        loss, seen = plain_policy_like_loss(model, batch)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), OPTIMIZER["clip_grad"]).item()
        optimizer.step()
        metrics.append({"loss": loss.item(), "grad_norm": norm, **seen})
    from safetensors.torch import load_file

    model.save_pretrained(folder / "trained")
    weights = load_file(folder / "trained" / "model.safetensors")
    return {"rows": rows, "metrics": metrics, "weights": weights}


@pytest.mark.parametrize("index", range(len(CASES)), ids=IDS)
def test_log_probs_and_entropy_equal_those_of_each_row_alone(ranks, references, index):
    rows = references[CASES[index][0]]["rows"]
    for rank in (case[index] for case in ranks):
        size = len({case[index]["rank"] for case in ranks})
        own = rows[rank["rank"] * NUM_ROWS // size : (rank["rank"] + 1) * NUM_ROWS // size]
        for name, expected in zip(("log_probs", "entropy"), zip(*own, strict=True), strict=True):
            torch.testing.assert_close(rank[name], torch.cat(expected), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("index", range(len(CASES)), ids=IDS)
def test_training_equals_a_plain_loop(ranks, references, index):
    reference = references[CASES[index][0]]
    for rank in (case[index] for case in ranks):
        for step, expected in zip(rank["metrics"], reference["metrics"], strict=True):
            for name, value in expected.items():
                assert step[name] == pytest.approx(value, rel=1e-4, abs=1e-5), name
            assert (step["lr"], step["grad_nonfinite"]) == (OPTIMIZER["lr"], 0.0)
        assert set(rank["weights"]) == set(reference["weights"])
        for name, weight in reference["weights"].items():
            torch.testing.assert_close(rank["weights"][name], weight, atol=2e-5, rtol=1e-4, msg=name)


@pytest.mark.parametrize("index", range(len(CASES)), ids=IDS)
def test_one_rank_of_each_data_parallel_part_has_the_outputs(ranks, index):
    sources = [case[index]["rank"] for case in ranks if case[index]["is_source"]]
    assert sorted(sources) == sorted({case[index]["rank"] for case in ranks})
