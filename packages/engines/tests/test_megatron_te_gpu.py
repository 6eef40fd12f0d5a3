"""Megatron's layers made of Transformer Engine, against a plain loop on the CPU, and beside those made without it."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_cases import plain_training, policy_like_loss, relative_error, shard, weights_of
from megatron_gpu_cases import (
    ALL_AWAY,
    CP,
    EP,
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
    pytest.mark.skipif(find_spec("transformer_engine") is None, reason="Transformer Engine is not installed"),
    pytest.mark.timeout(550),
]

ETP = "expert_tensor_parallel_size"
ON_ONE: list[Case] = [
    ("qwen3", {}, {}),
    ("qwen3", {"use_distributed_optimizer": False, "max_token_len_per_gpu": 30}, RECOMPUTE),
    ("qwen3", {**OVERLAP, **ALL_AWAY, "micro_batch_size_per_gpu": 2}, SELECTIVE),
    ("qwen2", {"fuse_elementwise": False}, {}),
    ("qwen3_moe", {"max_token_len_per_gpu": 30}, {}),
    ("qwen3_moe", {**OVERLAP}, SELECTIVE),
]
ON_TWO: list[Case] = [
    ("qwen3", {TP: 2, **OVERLAP}, {}),
    ("qwen3", {TP: 2, **SP, "max_token_len_per_gpu": 30}, RECOMPUTE),
    ("qwen3", {TP: 2, **SP}, SELECTIVE),
    ("qwen2", {PP: 2, "use_distributed_optimizer": False, "micro_batch_size_per_gpu": 2}, {}),
    ("qwen3", {PP: 2, VPP: 2, "micro_batch_size_per_gpu": 2, **OVERLAP}, {}),
    ("qwen3", {CP: 2, "max_token_len_per_gpu": 30}, SELECTIVE),
    ("qwen3_moe", {EP: 2, **OVERLAP, "max_token_len_per_gpu": 30}, {}),
    ("qwen3_moe", {TP: 2, EP: 2, ETP: 1, **SP}, {}),
    ("qwen3_moe", {TP: 2, **SP}, {}),
]
CASES = {1: ON_ONE, 2: ON_TWO}
NUMBERED = [(world_size, index) for world_size, cases in CASES.items() for index in range(len(cases))]
LOCAL, TE = {"transformer_impl": "local"}, {"transformer_impl": "transformer_engine"}


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    return make_models(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def references(folders) -> dict[str, Any]:
    """Metrics of each step and weights, from transformers and torch's AdamW on the CPU in float32."""
    return {family: plain_training(folder, batches()) for family, folder in folders.items()}


@pytest.fixture(scope="module")
def trained(folders, tmp_path_factory) -> Any:
    """By number of GPUs and further configuration, which is asked for when it is needed, what all ranks did."""
    known: dict[Any, Any] = {}

    def of(world_size: int, **settings: Any) -> list[Any]:
        if torch.cuda.device_count() < world_size:
            pytest.skip(f"needs {world_size} GPUs")
        key = (world_size, *settings.items())
        if key not in known:
            store = tmp_path_factory.mktemp("store") / "ranks"
            cases = [(str(folders[family]), engine | settings, model) for family, engine, model in CASES[world_size]]
            known[key] = run_ranks(train, world_size, str(store), cases, timeout_s=400)
        return known[key]

    return of


def largest_errors(actual: Any, expected: Any) -> tuple[float, float]:
    """Of all metrics, relative to the expected number or 0.1; and of all weights, relative to the largest of each."""
    (history, weights), (expected_history, expected_weights) = actual[:2], expected[:2]
    assert weights.keys() == expected_weights.keys()
    of_metrics = max(
        abs(step[name] - other[name]) / max(abs(other[name]), 0.1)
        for step, other in zip(history, expected_history, strict=True)
        for name in other
    )
    return of_metrics, max(relative_error(weights[name], weight) for name, weight in expected_weights.items())


@pytest.mark.parametrize(("world_size", "index"), NUMBERED)
def test_training_stays_near_a_plain_loop(trained, references, world_size, index):
    """Within the bounds of bfloat16 without Transformer Engine; in TF32, with three bits more, an eighth of them."""
    family = CASES[world_size][index][0]
    for dtype, share in (("bfloat16", 1), ("float32", 8)):
        for rank in trained(world_size, param_dtype=dtype, **TE):
            of_metrics, of_weights = largest_errors(rank[index], references[family])
            assert of_metrics < 0.1 / share, dtype
            assert of_weights < 0.25 / share, dtype


@pytest.mark.parametrize(("world_size", "index"), NUMBERED)
def test_training_is_as_exact_as_without(trained, references, world_size, index):
    """In bfloat16 both miss the plain loop by rounding; gradients are even added up from unrounded ones."""
    expected = references[CASES[world_size][index][0]]
    local, te = (
        largest_errors(trained(world_size, param_dtype="bfloat16", **kind)[0][index], expected) for kind in (LOCAL, TE)
    )
    assert te[0] < 2 * local[0]
    assert te[1] < 2 * local[1]


def test_bfloat16_takes_it_by_itself(trained):
    """And float32 does not."""
    for dtype, kind in (("bfloat16", TE), ("float32", LOCAL)):
        for by_itself, chosen in zip(trained(1, param_dtype=dtype), trained(1, param_dtype=dtype, **kind), strict=True):
            assert by_itself[0][0] == pytest.approx(chosen[0][0])


def accumulate(store: str, folders: list[str], kinds: list[dict[str, str]]) -> list[list[list[float]]]:
    """For each model and kind the gradient norms of either batch, and of one after the other without a step between."""
    join_gpus(store)
    return [[_norms(folder, kind) for kind in kinds] for folder in folders]


def _norms(folder: str, kind: dict[str, str]) -> list[float]:
    engine = engine_on_gpu(folder, {"param_dtype": "bfloat16", "max_token_len_per_gpu": 30} | kind, {})
    norms = []
    for parts in ([0], [1], [0, 1]):
        with engine.train_mode():
            engine.optimizer_zero_grad()
            for part in parts:
                engine.forward_backward_batch(batches()[part], policy_like_loss, calculate_entropy=True)
            norms.append(engine.grad_norm())
    engine.close()
    return norms


def test_gradients_of_several_batches_add_up(folders, tmp_path):
    args = str(tmp_path / "store"), [str(folders[family]) for family in ("qwen3", "qwen3_moe")], [LOCAL, TE]
    for local, te in run_ranks(accumulate, 1, *args, timeout_s=200)[0]:
        assert abs(local[2] - local[1]) > 0.1 * local[2]  # that of the last batch alone would be told
        assert te == pytest.approx(local, rel=0.05)


def export(store: str, cases: list[tuple[str, dict[str, Any]]]) -> list[Any]:
    """Of each case the names of this rank's parameters, what it hands out whole, and its shards."""
    join_gpus(store)
    out = []
    for folder, settings in cases:
        engine = engine_on_gpu(folder, settings, {})
        names = [name for chunk in engine.chunks for name, _ in chunk.named_parameters()]
        shards = [
            (name, each.start, tuple(each.global_shape), each.tensor.cpu())
            for name, each in engine.get_per_tensor_shards()
        ]
        out.append((names, {name: weight.cpu() for name, weight in engine.get_per_tensor_param()}, shards))
        engine.close()
    return out


@pytest.mark.parametrize("world_size", [1, 2])
def test_weights_come_out_as_they_went_in(folders, tmp_path, world_size):
    from safetensors.torch import load_file

    if torch.cuda.device_count() < world_size:
        pytest.skip(f"needs {world_size} GPUs")
    settings = {1: [{}], 2: [{TP: 2, **SP}, {PP: 2}]}[world_size]
    cases = [("qwen2", each | {"use_distributed_optimizer": False}) for each in settings]
    cases += [("qwen3_moe", each) for each in ({1: [{}], 2: [{EP: 2}, {TP: 2, **SP}]}[world_size])]
    of_cases = [(str(folders[family]), each | TE | {"param_dtype": "bfloat16"}) for family, each in cases]
    for rank in run_ranks(export, world_size, str(tmp_path / "store"), of_cases, timeout_s=300):
        for (family, _), (names, full, shards) in zip(cases, rank, strict=True):
            assert any(name.endswith("linear_qkv.layer_norm_weight") for name in names)
            saved = load_file(folders[family] / "model.safetensors")
            assert full.keys() == saved.keys()
            for name, weight in full.items():
                assert torch.equal(weight, saved[name].bfloat16()), name
            assert shards
            for name, start, shape, part in shards:
                assert shape == tuple(saved[name].shape)
                region = tuple(slice(at, at + size) for at, size in zip(start, part.shape, strict=True))
                assert torch.equal(part, saved[name].bfloat16()[region]), name


def save_and_load(store: str, folder: str, target: str, settings: dict[str, Any]) -> list[Any]:
    """For each (with what it is saved, with what loaded) weights and metrics of what comes after, on both sides."""
    join_gpus(store)

    def steps(engine: Any) -> list[Any]:
        return [
            engine.train_batch(shard(engine, batch), policy_like_loss, calculate_entropy=True) for batch in batches()
        ]

    def weights(engine: Any) -> dict[str, torch.Tensor]:
        return {name: weight.cpu() for name, weight in weights_of(engine).items()}

    seen = []
    for number, (saver, loader) in enumerate(((LOCAL, TE), (TE, LOCAL), (TE, TE))):
        engine = engine_on_gpu(folder, settings | saver, {})
        steps(engine)
        engine.save_checkpoint(f"{target}/{number}")
        saved, history = weights(engine), steps(engine)
        engine.close()
        engine = engine_on_gpu(folder, settings | loader, {})
        engine.load_checkpoint(f"{target}/{number}")
        seen.append((saved, weights(engine), history, steps(engine)))
        engine.close()
    return seen


@pytest.mark.parametrize(
    ("world_size", "family", "settings"),
    [
        (1, "qwen3", {}),
        (1, "qwen2", {"use_distributed_optimizer": False}),
        (2, "qwen3", {TP: 2, **SP}),
        (2, "qwen3_moe", {EP: 2}),
    ],
)
def test_a_checkpoint_of_either_goes_on_with_the_other(folders, tmp_path, world_size, family, settings):
    """Weights are the same bit for bit; metrics of the next steps as near as both stay to a plain loop, or nearer."""
    if torch.cuda.device_count() < world_size:
        pytest.skip(f"needs {world_size} GPUs")
    args = (
        str(tmp_path / "store"),
        str(folders[family]),
        str(tmp_path / "saved"),
        {"param_dtype": "bfloat16"} | settings,
    )
    for rank in run_ranks(save_and_load, world_size, *args, timeout_s=500):
        for (saved, loaded, history, resumed), rel in zip(rank, (0.1, 0.1, 1e-3), strict=True):
            assert saved.keys() == loaded.keys()
            for name, weight in saved.items():
                assert torch.equal(loaded[name], weight), name
            for step, expected in zip(resumed, history, strict=True):
                assert step == pytest.approx(expected, rel=rel, abs=rel / 10)
