"""close() frees modules, gradients and the threads of process groups."""

import gc
import os

import pytest
import torch
from engine_cases import VOCAB, build_engine, make_batch, policy_like_loss, shard
from tidemill_testing import run_ranks, tiny_model

EP = "expert_model_parallel_size"
CASES = {
    "fsdp2": [("qwen3", {}), ("qwen3_moe", {"ulysses_sequence_parallel_size": 2})],
    "megatron": [
        ("qwen3", {"pipeline_model_parallel_size": 2}),
        ("qwen3_moe", {EP: 2}),
        ("qwen3_moe", {EP: 2, "moe_token_dispatcher_type": "allgather"}),
        ("qwen3_moe", {"model": {"gradient_checkpointing": True, "router_aux_loss_coef": 0.1}}),
    ],
}


def left(backend):
    """Count modules, tensors of autograd graphs, and threads."""
    gc.collect()
    objects = gc.get_objects()
    modules = [one for one in objects if isinstance(one, torch.nn.Module)]
    in_graphs = [one for one in objects if isinstance(one, torch.Tensor) and one.requires_grad]
    # torch caches DTensor sharding decisions with their meshes, and so one FSDP2 group
    return len(modules), len(in_graphs), 0 if backend == "fsdp2" else len(os.listdir("/proc/self/task"))


def run_and_close(backend, cases):
    out = []
    for family, settings in cases:
        engine = build_engine(family, backend=backend, **settings)
        engine.train_batch(shard(engine, make_batch(6, seed=1)), policy_like_loss, calculate_entropy=True)
        engine.close()
        del engine
        out.append(left(backend))
    return out


@pytest.mark.parametrize("backend", sorted(CASES))
def test_close_frees_modules_gradients_and_threads(tmp_path, backend):
    if backend == "megatron":
        pytest.importorskip("megatron.core")
    paths = {family: tiny_model(tmp_path / family, family, vocab_size=VOCAB) for family in ("qwen3", "qwen3_moe")}
    cases = [(paths[family], settings) for family, settings in CASES[backend]]
    for of_rank in run_ranks(run_and_close, 2, backend, [*cases, *cases], timeout_s=200):
        imported = of_rank[len(cases) - 1]  # kept by libraries after their import
        assert of_rank[len(cases) :] == [imported] * len(cases)
