"""Gradients of the Megatron engine over several batches and after a reset, in several layouts."""

from pathlib import Path
from typing import Any

import pytest
import torch
from engine_cases import (
    OPTIMIZER,
    VOCAB,
    build_engine,
    check_training,
    make_batch,
    plain_training,
    policy_like_loss,
    relative_error,
    shard,
    weights_of,
)
from tidemill_engines import OptimizerConfig
from tidemill_testing import run_ranks, tiny_model
from torch.multiprocessing.reductions import StorageWeakRef

pytest.importorskip("megatron.core")
pytestmark = pytest.mark.timeout(280)

TP, PP, EP, ETP = (
    f"{name}_size"
    for name in ("tensor_model_parallel", "pipeline_model_parallel", "expert_model_parallel", "expert_tensor_parallel")
)
SP = {"sequence_parallel": True}
SUMS: list[tuple[str, dict[str, Any]]] = [
    ("qwen3", {}),
    ("qwen3", {"use_distributed_optimizer": False}),
    ("qwen3", {"grad_offload": True}),
    ("qwen3", {TP: 2, **SP}),
    ("qwen2", {PP: 2}),
    ("qwen3_moe", {TP: 2, EP: 2, ETP: 1, **SP}),
]


def make_batches() -> list[Any]:
    return [make_batch(7, seed=1), make_batch(6, seed=2)]


def step_on_both(path: Path, settings: dict[str, Any]) -> Any:
    """Norms and weights after one step on the gradients of two batches, each with its own context."""
    engine = build_engine(path, micro_batch_size_per_gpu=2, **settings)
    for batch in make_batches():
        with engine.train_mode():
            engine.forward_backward_batch(shard(engine, batch), policy_like_loss, calculate_entropy=True)
    with engine.train_mode():
        norms = engine.grad_norm(), engine.grad_norm(), engine.optimizer_step()
    weights = weights_of(engine)
    engine.close()
    return norms, weights


def run_sums(paths: dict[str, Path]) -> Any:
    return [
        (step_on_both(paths[family], {}), step_on_both(paths[family], {"backend": "megatron", **settings}))
        for family, settings in SUMS
    ]


def test_gradients_of_several_batches_add_up(tmp_path):
    fields = {"qwen3": {"tie_word_embeddings": False}, "qwen2": {"tie_word_embeddings": True}, "qwen3_moe": {}}
    paths = {family: tiny_model(tmp_path / family, family, vocab_size=VOCAB, **fields[family]) for family in fields}
    for results in run_ranks(run_sums, 2, paths, timeout_s=250):
        for case, ((expected, weights), (norms, actual)) in zip(SUMS, results, strict=True):
            assert norms == pytest.approx(expected, rel=1e-5), case
            for name, weight in weights.items():
                assert relative_error(actual[name], weight) < 1e-5, (case, name)


REFUSED = "call optimizer_zero_grad\\(\\) before another one"


def run_refusals(path: Path) -> Any:
    """Norms of steps without and with overlap; the second step follows a refused backward."""
    out = []
    for settings in ({}, {"overlap_grad_reduce": True, "overlap_param_gather": True}):
        engine = build_engine(path, backend="megatron", **settings)
        rows = [shard(engine, batch) for batch in make_batches()]
        norms = [engine.train_batch(rows[0], policy_like_loss, calculate_entropy=True)["grad_norm"]]
        with engine.train_mode():
            engine.forward_backward_batch(rows[0], policy_like_loss, calculate_entropy=True)
            if not settings:
                engine.grad_norm()
            with pytest.raises(RuntimeError, match=REFUSED):
                engine.forward_backward_batch(rows[1], policy_like_loss, calculate_entropy=True)
            norms.append(engine.optimizer_step())
            with pytest.raises(RuntimeError, match=REFUSED):
                engine.forward_backward_batch(rows[1], policy_like_loss, calculate_entropy=True)
        engine.infer_batch(rows[1])
        norms.append(engine.train_batch(rows[1], policy_like_loss, calculate_entropy=True)["grad_norm"])
        out.append((norms, weights_of(engine)))
        engine.close()
    return out


def test_backward_after_reduction_is_refused(tmp_path):
    path = tiny_model(tmp_path, "qwen3", vocab_size=VOCAB)
    first, second = make_batches()
    history, expected = plain_training(path, [first, first, second])
    for results in run_ranks(run_refusals, 2, path, timeout_s=250):
        for norms, weights in results:
            assert norms == pytest.approx([metrics["grad_norm"] for metrics in history], rel=1e-5)
            assert all(relative_error(weights[name], weight) < 1e-5 for name, weight in expected.items())


OFFLOAD = {"param_offload": True, "optimizer_offload": True}
RESETS = [{}, OFFLOAD, {"use_distributed_optimizer": False}, {TP: 2}]
FIRST = {"lr": 0.1, "lr_warmup_steps": 3, "weight_decay": 0.3, "decay_norms_and_biases": False}


def run_phase(path: Path, batches: list[Any], settings: dict[str, Any], folder: Path) -> Any:
    """Train a first phase, then reset the optimizer and train a second phase from the same weights."""
    engine = build_engine(path, backend="megatron", optimizer=FIRST, **settings)
    engine.train_batch(shard(engine, batches[0]), policy_like_loss, calculate_entropy=True)
    engine.save_hf(folder)
    engine.reset_optimizer(OptimizerConfig(**OPTIMIZER))
    history = [engine.train_batch(shard(engine, batch), policy_like_loss, calculate_entropy=True) for batch in batches]
    weights = weights_of(engine)
    engine.close()
    return history, weights


def masters_around_a_reset(path: Path, batches: list[Any], settings: dict[str, Any]) -> Any:
    """Master weights before and after a reset, and the largest number in the rest of the state after it."""
    from tidemill_engines.megatron.optimizer import torch_optimizers

    def masters() -> torch.Tensor:
        of_groups = [group for each in torch_optimizers(engine.optimizer) for group in each.param_groups]
        return torch.cat([param.detach().flatten() for group in of_groups for param in group["params"]]).float()

    engine = build_engine(path, backend="megatron", param_dtype="bfloat16", **settings)
    for batch in batches:
        engine.train_batch(shard(engine, batch), policy_like_loss, calculate_entropy=True)
    with engine._offloader.onloaded("optimizer"):
        before = masters().clone()
        engine.reset_optimizer(engine.optimizer_config)
        after = masters().clone()
        states = [state for each in torch_optimizers(engine.optimizer) for state in each.state.values()]
        largest = max(tensor.abs().max().item() for state in states for tensor in state.values())
    engine.close()
    return before, after, largest


def run_resets(path: Path, batches: list[Any], folder: Path) -> Any:
    return [
        (
            run_phase(path, batches, settings, folder / str(number)),
            masters_around_a_reset(path, batches, settings),
        )
        for number, settings in enumerate(RESETS)
    ]


def test_reset_optimizer_keeps_only_the_weights(tmp_path):
    path = tiny_model(tmp_path / "model", "qwen2", vocab_size=VOCAB)
    results = run_ranks(run_resets, 2, path, make_batches(), tmp_path, timeout_s=250)
    for number, settings in enumerate(RESETS):
        expected = plain_training(tmp_path / str(number), make_batches())
        check_training([of_rank[number][0] for of_rank in results], expected, settings)
        for before, after, largest in (of_rank[number][1] for of_rank in results):
            assert not torch.equal(before, before.bfloat16().float())  # masters are more exact than parameters
            assert torch.equal(after, before)
            assert largest == 0


def run_outputs(path: Path) -> list[list[str]]:
    """For each call of the loss, the outputs of earlier micro-batches that are still in memory."""
    engine = build_engine(path, backend="megatron", micro_batch_size_per_gpu=1)
    outputs: list[dict[str, Any]] = []
    kept = []

    def loss(output: Any, micro_batch: Any, normalizer: Any) -> Any:
        kept.append([name for names in outputs for name, memory in names.items() if not memory.expired()])
        outputs.append({name: StorageWeakRef(column.untyped_storage()) for name, column in output.columns().items()})
        return policy_like_loss(output, micro_batch, normalizer)

    engine.train_batch(make_batch(4, seed=1), loss, calculate_entropy=True)
    engine.close()
    return kept


def test_training_step_keeps_no_outputs(tmp_path):
    path = tiny_model(tmp_path, "qwen3", vocab_size=VOCAB)
    assert run_ranks(run_outputs, 1, path) == [[[], [], [], []]]
