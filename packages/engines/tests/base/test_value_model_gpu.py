"""Value models on GPUs, with either engine, against transformers' model for token classification on the CPU."""

from pathlib import Path
from typing import Any

import pytest
import torch
from engine_cases import VOCAB, make_batch, relative_error
from tidemill_testing import run_ranks, tiny_model
from value_cases import plain_value_training, run_values, with_value_head

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.timeout(300),
]

TP, PP, EP = "tensor_model_parallel_size", "pipeline_model_parallel_size", "expert_model_parallel_size"
MEGATRON = {"backend": "megatron", "device": "cuda", "max_token_len_per_gpu": 40}
BF16 = {"param_dtype": "bfloat16"}
TE = BF16 | {"transformer_impl": "transformer_engine"}
LAYOUTS: dict[tuple[str, int], list[dict[str, Any]]] = {
    ("qwen3", 1): [{"device": "cuda", "max_token_len_per_gpu": 40}, MEGATRON, MEGATRON | BF16],
    ("qwen3", 2): [
        {"device": "cuda", "ulysses_sequence_parallel_size": 2},
        MEGATRON | {TP: 2, "sequence_parallel": True},
        MEGATRON | {PP: 2},
        MEGATRON | BF16 | {TP: 2, "sequence_parallel": True},
    ],
    ("qwen3_moe", 2): [MEGATRON | {EP: 2}],
}
WITH_TE: dict[tuple[str, int], list[dict[str, Any]]] = {
    ("qwen3", 1): [MEGATRON | TE],
    ("qwen3", 2): [MEGATRON | TE | {TP: 2, "sequence_parallel": True}, MEGATRON | TE | {PP: 2}],
}


def run_on_gpus(store: str, path: Path, batches: list[Any], layouts: list[dict[str, Any]]) -> Any:
    from megatron_gpu_cases import join_gpus

    join_gpus(store)
    results = run_values(path, batches, layouts)
    on_cpu = [{name: weight.float().cpu() for name, weight in weights.items()} for *_, weights in results]
    return [(part, values.cpu(), history, own) for (part, values, history, _), own in zip(results, on_cpu, strict=True)]


def check_on_gpus(folder: Path, family: str, world_size: int, layouts: list[dict[str, Any]]) -> None:
    if torch.cuda.device_count() < world_size:
        pytest.skip(f"needs {world_size} GPUs")
    source = tiny_model(folder / "model", family, num_hidden_layers=4, vocab_size=VOCAB, tie_word_embeddings=False)
    path = with_value_head(source, folder / "valued")
    batches = [make_batch(9, seed=1), make_batch(5, seed=2), make_batch(8, seed=3)]
    values, history, weights = plain_value_training(path, batches)
    ranks = run_ranks(run_on_gpus, world_size, str(folder / "store"), path, batches, layouts, timeout_s=250)
    for layout, *of_ranks in zip(layouts, *ranks, strict=True):
        tolerance = 4e-2 if "param_dtype" in layout else 1e-4
        parts = {part: own for part, own, _, _ in of_ranks}
        found = torch.cat([parts[part] for part in sorted(parts)])
        errors = {"values": relative_error(found.float(), values)}
        for _, _, steps, own in of_ranks:
            assert own.keys() == weights.keys()
            errors["weights"] = max(relative_error(own[name], weight) for name, weight in weights.items())
            errors["metrics"] = max(
                abs(step[name] - other[name]) / max(abs(other[name]), 0.1)
                for step, other in zip(steps, history, strict=True)
                for name in other
            )
            print(f"{family} {world_size} GPUs {layout}: {errors}, at most {tolerance}")
            assert max(errors.values()) < tolerance, (layout, errors)


@pytest.mark.parametrize(("family", "world_size"), LAYOUTS)
def test_values_and_training_equal_transformers_on_gpus(tmp_path, family, world_size):
    if any(layout.get("backend") == "megatron" for layout in LAYOUTS[family, world_size]):
        pytest.importorskip("megatron.core")
    check_on_gpus(tmp_path, family, world_size, LAYOUTS[family, world_size])


@pytest.mark.parametrize(("family", "world_size"), WITH_TE)
def test_values_with_transformer_engine(tmp_path, family, world_size):
    pytest.importorskip("transformer_engine")
    check_on_gpus(tmp_path, family, world_size, WITH_TE[family, world_size])
