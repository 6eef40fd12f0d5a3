"""The Megatron engine on GPUs: its kernels, and training on one and two GPUs, compared with a plain loop on the CPU."""

from pathlib import Path
from typing import Any

import pytest
import torch
from engine_cases import plain_training, relative_error, trained_on
from megatron_gpu_cases import (
    CP,
    EP,
    OFFLOAD_ALL,
    OVERLAP,
    PP,
    RECOMPUTE,
    SELECTIVE,
    SP,
    TP,
    VPP,
    Case,
    batches,
    engine_on_gpu,
    join_gpus,
    make_models,
    train,
)
from tidemill_testing import run_ranks

pytest.importorskip("megatron.core")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.timeout(550),
]

ON_ONE: list[Case] = [
    ("qwen3", {}, {}),
    ("qwen3", {"use_distributed_optimizer": False, "max_token_len_per_gpu": 30}, RECOMPUTE),
    ("qwen3", {**OVERLAP, **OFFLOAD_ALL, "micro_batch_size_per_gpu": 2}, SELECTIVE),
    ("qwen2", {"fuse_elementwise": False}, {}),
    ("qwen3_moe", {"max_token_len_per_gpu": 30}, {}),
]
ON_TWO: list[Case] = [
    ("qwen3", {"max_token_len_per_gpu": 30}, {}),
    ("qwen3", {**OVERLAP}, {}),
    ("qwen3", {TP: 2, **OVERLAP}, {}),
    ("qwen3", {TP: 2, **SP, "max_token_len_per_gpu": 30}, RECOMPUTE),
    ("qwen2", {PP: 2, "use_distributed_optimizer": False, "micro_batch_size_per_gpu": 2}, {}),
    ("qwen3", {PP: 2, VPP: 2, "micro_batch_size_per_gpu": 2, **OVERLAP}, {}),
    ("qwen3", {CP: 2, "max_token_len_per_gpu": 30}, SELECTIVE),
    ("qwen3_moe", {EP: 2, **OVERLAP, "max_token_len_per_gpu": 30}, {}),
    ("qwen3_moe", {TP: 2, EP: 2, "expert_tensor_parallel_size": 1, **SP}, {}),
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    return make_models(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def references(folders) -> dict[str, Any]:
    """Metrics of each step and weights, from transformers and torch's AdamW on the CPU in float32."""
    return {family: plain_training(folder, batches()) for family, folder in folders.items()}


def _ranks(folders, tmp_path_factory, world_size: int, cases: list[Case], **settings: Any) -> list[Any]:
    if torch.cuda.device_count() < world_size:
        pytest.skip(f"needs {world_size} GPUs")
    store = tmp_path_factory.mktemp("store") / "ranks"
    of_cases = [(str(folders[family]), engine | settings, model) for family, engine, model in cases]
    return run_ranks(train, world_size, str(store), of_cases, timeout_s=500)


@pytest.fixture(scope="module")
def one(folders, tmp_path_factory):
    return _ranks(folders, tmp_path_factory, 1, ON_ONE)


@pytest.fixture(scope="module")
def two(folders, tmp_path_factory):
    return _ranks(folders, tmp_path_factory, 2, ON_TWO)


@pytest.fixture(scope="module")
def one_in_bfloat16(folders, tmp_path_factory):
    return _ranks(folders, tmp_path_factory, 1, ON_ONE, param_dtype="bfloat16")


@pytest.fixture(scope="module")
def two_in_bfloat16(folders, tmp_path_factory):
    return _ranks(folders, tmp_path_factory, 2, ON_TWO, param_dtype="bfloat16")


def _check(ranks, reference, index: int, *, rel: float, of_weights: float) -> None:
    history, weights = reference
    for actual, actual_weights, _, _, performance in (rank[index] for rank in ranks):
        for step, expected in zip(actual, history, strict=True):
            assert {name: step[name] for name in expected} == pytest.approx(expected, rel=rel, abs=rel / 10)
        assert actual_weights.keys() == weights.keys()
        for name, weight in weights.items():
            assert relative_error(actual_weights[name], weight) < of_weights, name
        assert performance["perf/tokens_per_s"] > 0


def _ids(cases: list[Case]) -> list[str]:
    return [f"{family} {engine} {model}" for family, engine, model in cases]


@pytest.mark.parametrize("index", range(len(ON_ONE)), ids=_ids(ON_ONE))
def test_one_gpu_equals_a_plain_loop(one, references, index):
    _check(one, references[ON_ONE[index][0]], index, rel=1e-4, of_weights=1e-4)


@pytest.mark.parametrize("index", range(len(ON_TWO)), ids=_ids(ON_TWO))
def test_two_gpus_equal_a_plain_loop(two, references, index):
    _check(two, references[ON_TWO[index][0]], index, rel=1e-4, of_weights=1e-4)


@pytest.mark.parametrize("index", range(len(ON_ONE)), ids=_ids(ON_ONE))
def test_one_gpu_in_bfloat16_stays_near_a_plain_loop(one_in_bfloat16, references, index):
    _check(one_in_bfloat16, references[ON_ONE[index][0]], index, rel=0.1, of_weights=0.25)


@pytest.mark.parametrize("index", range(len(ON_TWO)), ids=_ids(ON_TWO))
def test_two_gpus_in_bfloat16_stay_near_a_plain_loop(two_in_bfloat16, references, index):
    _check(two_in_bfloat16, references[ON_TWO[index][0]], index, rel=0.1, of_weights=0.25)


def test_offloading_frees_gpu_memory(one_in_bfloat16):
    _, weights, offloaded, onloaded, _ = one_in_bfloat16[0][2]
    num_params = sum(weight.numel() for weight in weights.values())
    # bfloat16 weights and float32 gradients; the optimizer state is not used yet
    assert (2 + 4) * num_params <= onloaded - offloaded < (2 + 4 + 1) * num_params


def save_and_load(store: str, folder: str, target: str) -> list[Any]:
    """Metrics and weights of two steps, uninterrupted and after loading a checkpoint saved in the background."""
    join_gpus(store)
    settings = {"param_dtype": "bfloat16", "max_token_len_per_gpu": 30}

    def steps(engine: Any) -> Any:
        history, weights = trained_on(engine, batches())
        return history, {name: weight.cpu() for name, weight in weights.items()}

    engine = engine_on_gpu(folder, settings, {}, checkpoint={"asynchronous": True})
    steps(engine)
    engine.save_checkpoint(f"{target}/two")
    results = [steps(engine)]
    engine.finish_checkpoint()
    engine.save_hf(f"{target}/hf")
    engine.close()
    engine = engine_on_gpu(folder, settings, {})
    engine.load_checkpoint(f"{target}/two")
    results.append(steps(engine))
    engine.close()
    return results


@pytest.mark.parametrize("world_size", [1, 2])
def test_training_resumes_from_a_checkpoint(folders, tmp_path, world_size):
    from safetensors.torch import load_file

    if torch.cuda.device_count() < world_size:
        pytest.skip(f"needs {world_size} GPUs")
    target = tmp_path / "saved"
    args = str(tmp_path / "store"), str(folders["qwen3"]), str(target)
    for (history, weights), (resumed, after) in run_ranks(save_and_load, world_size, *args, timeout_s=500):
        for step, expected in zip(resumed, history, strict=True):
            assert step == pytest.approx(expected, rel=1e-3, abs=1e-4)
        exported = load_file(target / "hf" / "model.safetensors")
        assert exported.keys() == weights.keys()
        for name, weight in weights.items():
            assert torch.equal(exported[name], weight)
            assert relative_error(after[name].float(), weight.float()) < 1e-2, name


@pytest.mark.parametrize("rank", range(4))
def test_varlen_kernel_for_parts_of_rows_equals_padded_attention(rank):
    from tidemill_engines.megatron.parallel.context_parallel import PartLayout, _padded, _varlen

    torch.manual_seed(0)
    device = torch.device("cuda")
    layout = PartLayout.from_lengths([8, 304, 16, 128, 512], 4, rank, device)
    num_queries = len(layout.padded_q)
    q = torch.randn(num_queries, 8, 64, device=device)
    k, v = (torch.randn(4 * num_queries, 2, 64, device=device) for _ in range(2))
    direction = torch.randn_like(q)

    def run(attention: Any, dtype: torch.dtype) -> list[torch.Tensor]:
        inputs = [x.to(dtype).requires_grad_() for x in (q, k, v)]
        out = attention(inputs[0], *(x[layout.keys] for x in inputs[1:]), layout, 0.1)
        return [out, *torch.autograd.grad((out * direction.to(dtype)).sum(), inputs)]

    exact = run(_padded, torch.float32)
    kernel, padded = run(_varlen, torch.bfloat16), run(_padded, torch.bfloat16)
    for name, truth, actual, same_dtype in zip(("out", "dq", "dk", "dv"), exact, kernel, padded, strict=True):
        error = ((actual.float() - truth).norm() / truth.norm()).item()
        rounding = ((same_dtype.float() - truth).norm() / truth.norm()).item()
        assert error < max(2 * rounding, 1e-3), f"{name}: {error} against {rounding} of the padded path"


@pytest.mark.parametrize(("dtype", "atol"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_compiled_rotation_equals_eager_rotation(dtype, atol):
    from tidemill_engines.megatron.patches.apply_rotary import apply_rotary
    from tidemill_engines.megatron.rotary import Rotary

    torch.manual_seed(0)
    frequencies = tuple(1e6 ** (-pair / 64) for pair in range(64))
    for num_tokens in (5, 700, 1333):
        x = torch.randn(num_tokens, 8, 128, device="cuda", dtype=dtype)
        rotary = Rotary(frequencies=frequencies).cos_sin(torch.arange(num_tokens, device="cuda")[None], dtype)
        plain = x.clone().requires_grad_()
        fused = x.clone().requires_grad_()
        out, expected = apply_rotary(fused, *rotary, fused=True), apply_rotary(plain, *rotary)
        direction = torch.randn_like(out)
        torch.testing.assert_close(out, expected, rtol=atol, atol=atol)
        [grad] = torch.autograd.grad((out * direction).sum(), fused)
        [expected_grad] = torch.autograd.grad((expected * direction).sum(), plain)
        torch.testing.assert_close(grad, expected_grad, rtol=atol, atol=atol)
