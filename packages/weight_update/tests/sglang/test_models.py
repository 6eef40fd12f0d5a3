"""SGLang's own model classes: updates give the same parameters as a fresh `load_weights`."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(600)]

MODELS = [
    "qwen2",
    "qwen2 tied",
    "qwen2 tied as state_dict",
    "qwen3",
    "qwen3 tied",
    "qwen3 from float32",
    "llama",
    "llama tied",
    "llama one kv head",
    "qwen3 moe",
    "qwen3 moe tied",
    "qwen3 moe tied as state_dict",
    "deepseek v3",
]
RANKS = [(1, 0), (2, 0), (2, 1)]


def run_script(*arguments: str) -> dict[str, list]:
    script = Path(__file__).parents[1] / "helpers" / "sglang_models_script.py"
    command = [sys.executable, str(script), *arguments]
    done = subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def found():
    return run_script()


@pytest.fixture(
    params=[(model, *rank) for model in MODELS for rank in RANKS], ids=lambda p: f"{p[0]}, {p[2]} of {p[1]}"
)
def result(request, found):
    model, tp_size, rank = request.param
    return model, (tp_size, rank), found[str(tp_size)][rank][model]


def test_update_equals_a_fresh_load_bitwise(result):
    """With a `WeightUpdater` and a receiver in each rank, in small buckets."""
    model, (_, rank), got = result
    if model == "qwen3 moe tied":
        lacks = "no tensor was sent for these parameters of the engine: 'lm_head.weight'"
        assert len(got["updated"]["refused"]) == (1 if rank == 0 else 0)
        assert all(lacks in message for message in got["updated"]["refused"])
        assert got["updated"]["differs_from_stock"] == ["lm_head.weight"]
    else:
        assert got["updated"]["refused"] == []
        assert got["updated"]["differs_from_stock"] == []
    assert got["updated"]["derived_differs"] == []
    assert got["updated"]["derived"] == (["w_kc", "w_vc"] if model == "deepseek v3" else [])


def test_recording_leaves_the_model_unchanged(result):
    _, _, got = result
    assert got["changed_by_recording"] == []
    assert got["same_plan_on_meta"]


def test_each_element_is_written_once_or_reported_as_uncovered(result):
    """SGLang's Qwen3-MoE has its own lm_head even with tied embeddings, and nothing fills it."""
    model, (tp_size, _), got = result
    assert got["wrong_counts"] == list(got["uncovered"])
    assert got["uncovered"] == ({"lm_head.weight": 192 * 64 // tp_size} if model == "qwen3 moe tied" else {})
    assert got["unused"] == (["lm_head.weight"] if model == "qwen2 tied as state_dict" else [])


@pytest.mark.slow
def test_published_deepseek_v3_is_loaded_by_copies_only():
    for ranks in run_script("--full-size").values():
        for got in ranks:
            assert isinstance(got, dict), got
            got = got["deepseek v3 671b"]
            assert got["names_as_in_a_checkpoint"]
            assert (got["through_loader"], got["unused"], got["uncovered"]) == ({}, [], {})
            assert got["not_written"] == []
            assert got["copies"] >= got["sources"] > 45_000
