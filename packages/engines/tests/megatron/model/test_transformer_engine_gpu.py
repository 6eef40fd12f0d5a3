"""Transformer Engine in Megatron's layers, compared with a plain loop on the CPU and with Megatron's own layers."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_cases import plain_training, policy_like_loss, relative_error, trained_on, weights_of
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
    trained,
)
from tidemill_testing import run_ranks

pytest.importorskip("megatron.core")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif(find_spec("transformer_engine") is None, reason="Transformer Engine is not installed"),
    pytest.mark.timeout(550),
]

ETP = "expert_tensor_parallel_size"
ON_ONE: list[Case] = [
    ("qwen3", {**OVERLAP, **OFFLOAD_ALL, "micro_batch_size_per_gpu": 2}, SELECTIVE),
    ("qwen2", {"use_distributed_optimizer": False, "max_token_len_per_gpu": 30}, RECOMPUTE),
    ("qwen3_moe", {"max_token_len_per_gpu": 30, "fuse_elementwise": True}, {}),
]
ON_TWO: list[Case] = [
    ("qwen3", {TP: 2, **SP, "max_token_len_per_gpu": 30}, SELECTIVE),
    ("qwen3_moe", {EP: 2, **OVERLAP, "max_token_len_per_gpu": 30}, {}),
    ("qwen3_moe", {TP: 2, **SP}, {}),
    ("qwen3_moe", {TP: 2, EP: 2, ETP: 1, **SP}, {}),
    ("qwen3", {TP: 2, **OVERLAP}, {}),
    ("qwen3", {PP: 2, VPP: 2, "micro_batch_size_per_gpu": 2}, RECOMPUTE),
    ("qwen3", {CP: 2}, {}),
]
CASES = {1: ON_ONE, 2: ON_TWO}
IN_TF32 = {1: 2, 2: 0}
EXPORTS: dict[int, list[Case]] = {
    1: [("qwen2", {}, {})],
    2: [
        ("qwen2", {PP: 2, "use_distributed_optimizer": False}, {}),
        ("qwen3_moe", {EP: 2}, {}),
        ("qwen3_moe", {TP: 2, **SP}, {}),
    ],
}
LOCAL, TE = {"transformer_impl": "local"}, {"transformer_impl": "transformer_engine"}
CHECKPOINTS = {
    1: [
        ("qwen2", {"use_distributed_optimizer": False}, LOCAL, TE),
        ("qwen3", {}, TE, LOCAL),
    ],
    2: [
        ("qwen3", {TP: 2, **SP}, LOCAL, TE),
        ("qwen3_moe", {EP: 2}, TE, LOCAL),
    ],
}
"""Family, configuration, and implementation of the layers when saving and when loading."""
BF16 = {"param_dtype": "bfloat16"}
EAGER = {"fuse_elementwise": False}


def numbered(cases: dict[int, Any]) -> list[tuple[int, int]]:
    return [(world_size, index) for world_size, each in cases.items() for index in range(len(each))]


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    return make_models(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def references(folders) -> dict[str, Any]:
    """Metrics of each step and weights, from transformers and torch's AdamW on the CPU in float32."""
    return {family: plain_training(folder, batches()) for family, folder in folders.items()}


@pytest.fixture(scope="module")
def results(folders, tmp_path_factory) -> Any:
    """Function that returns each rank's results for a number of GPUs. One set of processes runs everything."""
    known: dict[int, Any] = {}

    def of(world_size: int) -> list[dict[str, Any]]:
        if torch.cuda.device_count() < world_size:
            pytest.skip(f"needs {world_size} GPUs")
        if world_size not in known:
            target = tmp_path_factory.mktemp("ranks")
            paths = {family: str(folder) for family, folder in folders.items()}
            known[world_size] = run_ranks(everything, world_size, str(target), paths, timeout_s=500)
        return known[world_size]

    return of


def everything(target: str, paths: dict[str, str]) -> dict[str, Any]:
    join_gpus(f"{target}/store")
    world_size = torch.distributed.get_world_size()
    cases = [(paths[family], EAGER | settings, model) for family, settings, model in CASES[world_size]]
    out: dict[str, Any] = {"te": [trained(path, each | BF16 | TE, model) for path, each, model in cases]}
    out["checkpoint"] = [
        save_and_load(paths[family], f"{target}/{number}", EAGER | BF16 | each, saver, loader)
        for number, (family, each, saver, loader) in enumerate(CHECKPOINTS[world_size])
    ]
    out["export"] = [export(paths[family], each) for family, each, _ in EXPORTS[world_size]]
    path, settings, _ = cases[IN_TF32[world_size]]
    out["tf32"] = trained(path, settings | EAGER | TE, {})
    if world_size == 1:
        out["local"] = [trained(path, each | BF16 | LOCAL, model) for path, each, model in cases]
        out["sums"] = [norms(paths["qwen3"], kind) for kind in (LOCAL, TE)]
        out["names"] = [parameters_of(paths["qwen3"], each) for each in (BF16, {})]
    return out


def parameters_of(path: str, settings: dict[str, Any]) -> list[str]:
    engine = engine_on_gpu(path, EAGER | settings, {})
    names = [name for name, _ in engine.chunks[0].named_parameters()]
    engine.close()
    return names


def norms(path: str, kind: dict[str, str]) -> list[float]:
    """The gradient norms of either batch, and of one after the other without a step between."""
    engine = engine_on_gpu(path, EAGER | BF16 | {"max_token_len_per_gpu": 30} | kind, {})
    out = []
    for parts in ([0], [1], [0, 1]):
        with engine.train_mode():
            engine.optimizer_zero_grad()
            for part in parts:
                engine.forward_backward_batch(batches()[part], policy_like_loss, calculate_entropy=True)
            out.append(engine.grad_norm())
    engine.close()
    return out


def export(path: str, settings: dict[str, Any]) -> Any:
    """Whole tensors and this rank's shards, as the engine exports them."""
    engine = engine_on_gpu(path, settings | EAGER | BF16 | TE, {})
    whole = {name: weight.cpu() for name, weight in engine.get_per_tensor_param()}
    shards = [
        (name, each.start, tuple(each.global_shape), each.tensor.cpu()) for name, each in engine.get_per_tensor_shards()
    ]
    engine.close()
    return whole, shards


def save_and_load(
    path: str, target: str, settings: dict[str, Any], saver: dict[str, str], loader: dict[str, str]
) -> Any:
    """Weights when saved and after loading, and the metrics of the next steps of both."""

    engine = engine_on_gpu(path, settings | saver, {})
    _, saved = trained_on(engine, batches())
    engine.save_checkpoint(target)
    history, _ = trained_on(engine, batches())
    engine.close()
    engine = engine_on_gpu(path, settings | loader, {})
    engine.load_checkpoint(target)
    loaded = weights_of(engine)
    resumed, _ = trained_on(engine, batches())
    engine.close()
    saved, loaded = ({name: weight.cpu() for name, weight in weights.items()} for weights in (saved, loaded))
    return saved, loaded, history, resumed


def largest_errors(actual: Any, expected: Any) -> tuple[float, float]:
    """Largest error of metrics, relative to the expected value or 0.1, and of weights, relative to their maximum."""
    (history, weights), (expected_history, expected_weights) = actual[:2], expected[:2]
    assert weights.keys() == expected_weights.keys()
    of_metrics = max(
        abs(step[name] - other[name]) / max(abs(other[name]), 0.1)
        for step, other in zip(history, expected_history, strict=True)
        for name in other
    )
    return of_metrics, max(relative_error(weights[name], weight) for name, weight in expected_weights.items())


@pytest.mark.parametrize(("world_size", "index"), numbered(CASES))
def test_training_equals_a_plain_loop_within_bfloat16_rounding(results, references, world_size, index):
    """The bounds are those of bfloat16 without Transformer Engine."""
    for rank in results(world_size):
        of_metrics, of_weights = largest_errors(rank["te"][index], references[CASES[world_size][index][0]])
        assert of_metrics < 0.1
        assert of_weights < 0.25


@pytest.mark.parametrize("world_size", IN_TF32)
def test_float32_training_has_the_rounding_errors_of_tf32(results, references, world_size):
    """TF32 has three bits more than bfloat16, so the bounds are an eighth of those."""
    family = CASES[world_size][IN_TF32[world_size]][0]
    for rank in results(world_size):
        of_metrics, of_weights = largest_errors(rank["tf32"], references[family])
        assert 1e-5 < of_metrics < 0.1 / 8
        assert of_weights < 0.25 / 8


@pytest.mark.parametrize("index", range(len(ON_ONE)))
def test_weight_errors_are_below_twice_those_of_local_layers(results, references, index):
    """Both differ from the plain loop only by rounding."""
    expected = references[ON_ONE[index][0]]
    local, te = (largest_errors(results(1)[0][kind][index], expected)[1] for kind in ("local", "te"))
    assert te < 2 * local


def test_auto_uses_transformer_engine_for_bfloat16_only(results):
    norms = "self_attention.linear_qkv.layer_norm_weight", "input_layernorm.weight"
    for names, own, other in zip(results(1)[0]["names"], norms, reversed(norms), strict=True):
        assert any(name.endswith(own) for name in names)
        assert not any(name.endswith(other) for name in names)


def test_gradients_of_several_batches_add_up(results):
    local, te = results(1)[0]["sums"]
    assert abs(local[2] - local[1]) > 0.1 * local[2]  # so the norm of the last batch alone would be noticed
    assert te == pytest.approx(local, rel=0.05)


@pytest.mark.parametrize(("world_size", "index"), numbered(EXPORTS))
def test_exported_weights_equal_loaded_weights(results, folders, world_size, index):
    from safetensors.torch import load_file

    saved = load_file(folders[EXPORTS[world_size][index][0]] / "model.safetensors")
    for whole, shards in (rank["export"][index] for rank in results(world_size)):
        assert whole.keys() == saved.keys()
        for name, weight in whole.items():
            assert torch.equal(weight, saved[name].bfloat16()), name
        assert shards
        for name, start, shape, part in shards:
            assert shape == tuple(saved[name].shape)
            region = tuple(slice(at, at + size) for at, size in zip(start, part.shape, strict=True))
            assert torch.equal(part, saved[name].bfloat16()[region]), name


@pytest.mark.parametrize(("world_size", "index"), numbered(CHECKPOINTS))
def test_checkpoint_resumes_with_the_other_implementation(results, world_size, index):
    """Weights are bitwise equal; metrics of the next steps within the bounds of bfloat16."""
    for saved, loaded, history, resumed in (rank["checkpoint"][index] for rank in results(world_size)):
        assert saved.keys() == loaded.keys()
        for name, weight in saved.items():
            assert torch.equal(loaded[name], weight), name
        for step, expected in zip(resumed, history, strict=True):
            assert step == pytest.approx(expected, rel=0.1, abs=0.01)
