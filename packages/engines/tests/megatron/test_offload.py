"""Offloading and recomputation with the Megatron engine: they save memory and do not change results."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_cases import VOCAB, build_engine, make_batch, policy_like_loss, shard, weights_of
from tidemill_testing import run_ranks, tiny_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(280)]

TP = "tensor_model_parallel_size"
OFFLOAD_ALL = {"param_offload": True, "grad_offload": True, "optimizer_offload": True}
OFFLOADS = [
    ({}, {}),
    ({}, {"param_offload": True}),
    ({}, {"grad_offload": True, "optimizer_offload": True}),
    ({"overlap_grad_reduce": True, "overlap_param_gather": True}, OFFLOAD_ALL),
    ({TP: 2, "param_dtype": "bfloat16"}, {}),
    ({TP: 2, "param_dtype": "bfloat16"}, OFFLOAD_ALL),
    ({TP: 2, "param_dtype": "bfloat16", "use_distributed_optimizer": False}, OFFLOAD_ALL),
]


megatron_engine = partial(build_engine, backend="megatron", max_token_len_per_gpu=40)


def device_bytes(engine: Any) -> tuple[int, int, int]:
    """The memory of parameters, gradients and optimizer state (with masters), each storage once."""
    from tidemill_engines.megatron.optimizer import torch_optimizers

    def total(tensors: Any) -> int:
        return sum({t.untyped_storage()._cdata: t.untyped_storage().size() for t in tensors}.values())

    params = [param.detach() for chunk in engine.chunks for param in chunk.parameters()]
    grads = [param.main_grad for chunk in engine.chunks for param in chunk.parameters()]
    own = {param.untyped_storage()._cdata for param in params}
    state = [
        tensor
        for each in torch_optimizers(engine.optimizer)
        for param in each.state
        for tensor in (param, *each.state[param].values())
    ]
    return total(params), total(grads), total(t for t in state if t.untyped_storage()._cdata not in own)


def run_offload(path: Path, batches: list[Any], layout: dict[str, Any], offload: dict[str, Any], folder: Path) -> Any:
    engine = megatron_engine(path, **layout, **offload)
    sizes = {"start": device_bytes(engine)}
    if offload.get("param_offload"):
        with pytest.raises(RuntimeError, match=r"params: offloaded to the CPU; call this within .* eval_mode"):
            engine.forward_backward_batch(batches[0], None, forward_only=True)
    if offload.get("grad_offload"):
        with pytest.raises(RuntimeError, match=r"grads: offloaded to the CPU; call this within train_mode"):
            engine.optimizer_step()
    rows = [shard(engine, batch) for batch in batches]

    def loss(output: Any, micro_batch: Any, normalizer: Any) -> Any:
        sizes["in a step"] = device_bytes(engine)
        return policy_like_loss(output, micro_batch, normalizer)

    history = [engine.train_batch(rows[0], loss, calculate_entropy=True)]
    sizes["after a step"] = device_bytes(engine)
    log_probs = engine.infer_batch(rows[1])["log_probs"].values()
    with engine.eval_mode():
        sizes["evaluating"] = device_bytes(engine)
    assert engine.streams_weights is offload.get("param_offload", False)
    shards = [(name, shard.tensor) for name, shard in engine.get_per_tensor_shards()]
    held = sum(tensor.double().sum().item() for _, tensor in shards)  # still valid after parameters are offloaded
    weights = weights_of(engine)
    engine.save_checkpoint(folder)
    sizes["after saving"] = device_bytes(engine)
    engine.train_batch(rows[1], policy_like_loss, calculate_entropy=True)
    engine.load_checkpoint(folder)
    sizes["after loading"] = device_bytes(engine)
    again = weights_of(engine)
    assert all(torch.equal(weights[name], again[name]) for name in weights)
    with engine.train_mode():
        engine.forward_backward_batch(rows[1], policy_like_loss, calculate_entropy=True)
    sizes["gradients offloaded"] = device_bytes(engine)
    with engine.train_mode():
        history.append({"grad_norm": engine.optimizer_step(), "lr": engine.lr_scheduler_step()})
        engine.optimizer_zero_grad()
    engine.reset_optimizer(engine.optimizer_config)
    sizes["after a reset"] = device_bytes(engine)
    history.append(engine.train_batch(rows[0], policy_like_loss, calculate_entropy=True))
    weights = weights_of(engine)
    engine.close()
    return sizes, history, log_probs, weights, held


def run_offloads(path: Path, batches: list[Any], folder: Path) -> list[Any]:
    return [
        run_offload(path, batches, layout, offload, folder / str(number))
        for number, (layout, offload) in enumerate(OFFLOADS)
    ]


def test_offloading_frees_memory_and_does_not_change_results(tmp_path):
    path = tiny_model(tmp_path / "model", "qwen3", vocab_size=VOCAB)
    batches = [make_batch(9, seed=1), make_batch(7, seed=2)]
    for results in run_ranks(run_offloads, 2, path, batches, tmp_path, timeout_s=250):
        assert all(size > 0 for size in results[0][0]["start"])
        for (layout, offload), (sizes, history, log_probs, weights, held) in zip(OFFLOADS, results, strict=True):
            expected = results[4 if TP in layout else 0]
            is_same = layout.keys() <= OFFLOADS[4 if TP in layout else 0][0].keys()
            same = torch.equal if is_same else partial(torch.allclose, rtol=1e-2 if TP in layout else 1e-4, atol=1e-5)
            for actual, wanted in zip(history, expected[1], strict=True):
                assert actual == pytest.approx(wanted, rel=0 if is_same else 1e-3, abs=0 if is_same else 1e-4)
            assert same(log_probs, expected[2])
            assert all(same(weights[name], weight) for name, weight in expected[3].items())
            assert held == pytest.approx(expected[4], rel=1e-3, abs=1e-3)
            wanted = [offload.get(f"{kind}_offload", False) for kind in ("param", "grad", "optimizer")]
            for moment in (
                "start",
                "after a step",
                "after saving",
                "after loading",
                "gradients offloaded",
                "after a reset",
            ):
                assert [size == 0 for size in sizes[moment]] == wanted, moment
            assert [size == 0 for size in sizes["in a step"]] == [False, False, wanted[2]]
            assert [size == 0 for size in sizes["evaluating"]] == [False, *wanted[1:]]


EXPERTS = {"expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1}
SELECTIVE = {"gradient_checkpointing": True, "recompute": "selective"}
LAYERS, NORMS = "TransformerLayer", "RMSNorm"
# How often modules run, for two layers with four norms each and a norm after them.
SAVINGS: list[tuple[str, dict[str, Any], dict[str, Any], dict[str, int]]] = [
    ("qwen3", {}, {}, {LAYERS: 2, NORMS: 9, "MLP": 2}),
    ("qwen3", {"gradient_checkpointing": True}, {}, {LAYERS: 4, NORMS: 17, "MLP": 4}),
    ("qwen3", SELECTIVE, {}, {LAYERS: 2, NORMS: 13, "MLP": 4}),
    ("qwen3", SELECTIVE, {"recompute_modules": ("core_attn",)}, {LAYERS: 2, NORMS: 9, "PackedAttention": 4}),
    ("qwen3_moe", {"router_aux_loss_coef": 0.1}, EXPERTS, {LAYERS: 2, NORMS: 9, "MoELayer": 2}),
    ("qwen3_moe", {"router_aux_loss_coef": 0.1, "gradient_checkpointing": True}, EXPERTS, {LAYERS: 4, "MoELayer": 4}),
    ("qwen3_moe", SELECTIVE | {"router_aux_loss_coef": 0.1}, EXPERTS, {LAYERS: 2, NORMS: 13, "MoELayer": 2}),
]


def run_savings(paths: dict[str, Path], batch: Any) -> list[Any]:
    out = []
    for family, model, settings, _ in SAVINGS:
        engine = megatron_engine(paths[family], model=model, **{TP: 2, "sequence_parallel": True}, **settings)
        counts: dict[str, int] = {}

        def count(module: Any, *_: Any, counts: dict[str, int] = counts) -> None:
            counts[type(module).__name__] = counts.get(type(module).__name__, 0) + 1

        hooks = [module.register_forward_pre_hook(count) for chunk in engine.chunks for module in chunk.modules()]
        history = [engine.train_batch(shard(engine, batch), policy_like_loss, calculate_entropy=True)]
        for hook in hooks:
            hook.remove()
        history.append(engine.train_batch(shard(engine, batch), policy_like_loss, calculate_entropy=True))
        out.append((history, weights_of(engine), counts))
        engine.close()
    return out


def test_recomputation_does_not_change_results(tmp_path):
    paths = {family: tiny_model(tmp_path / family, family, vocab_size=VOCAB) for family in ("qwen3", "qwen3_moe")}
    for results in run_ranks(run_savings, 2, paths, make_batch(4, seed=1), timeout_s=250):
        expected = dict(zip((family for family, *_ in reversed(SAVINGS)), reversed(results), strict=True))
        for (family, *_, counts), (history, weights, counted) in zip(SAVINGS, results, strict=True):
            assert {name: counted[name] for name in counts} == counts
            for actual, wanted in zip(history, expected[family][0], strict=True):
                assert actual == pytest.approx(wanted, rel=1e-5, abs=1e-7)
            for name, weight in expected[family][1].items():
                torch.testing.assert_close(weights[name], weight, rtol=1e-5, atol=1e-6)


def run_reference(path: Path, batch: Any, folder: Path) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Log-probabilities of a policy, and those of an engine without an optimizer with the size of its gradients."""
    from tidemill_engines.megatron.parallel.data_parallel import grad_buffers

    engine = build_engine(path, backend="megatron", **{TP: 2})
    expected = engine.infer_batch(batch)["log_probs"].values()
    engine.save_checkpoint(folder)
    engine.close()
    engine = build_engine(path, backend="megatron", optimizer=False, **{TP: 2}, **OFFLOAD_ALL)
    engine.load_checkpoint(folder)
    actual = engine.infer_batch(batch)["log_probs"].values()
    num_bytes = sum(buffer.nbytes for buffer in grad_buffers(engine.chunks))
    with pytest.raises(RuntimeError, match="has no optimizer"):
        engine.train_batch(batch, policy_like_loss)
    engine.close()
    return expected, actual, num_bytes


def test_engine_without_optimizer_has_no_gradients(tmp_path):
    path = tiny_model(tmp_path / "model", "qwen3", vocab_size=VOCAB)
    for expected, actual, num_bytes in run_ranks(run_reference, 2, path, make_batch(5), tmp_path / "saved"):
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)  # weights have other addresses
        assert num_bytes == 0
