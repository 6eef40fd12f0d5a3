"""Several Megatron engines in the same processes: policy, reference and value model."""

import pytest
import torch
import torch.distributed as dist
from engine_cases import VOCAB, build_engine, make_batch, policy_like_loss, shard
from tidemill_testing import run_ranks, tiny_model
from value_cases import value_loss

pytest.importorskip("megatron.core")
TP, PP = "tensor_model_parallel_size", "pipeline_model_parallel_size"
LAYOUTS = {
    "tp": {TP: 2, "sequence_parallel": True, "expert_tensor_parallel_size": 1},
    "pp": {PP: 2, "virtual_pipeline_model_parallel_size": 2, "param_offload": True, "grad_offload": True},
}
POLICY, REFERENCE, CRITIC = "policy", "reference", "critic"
NUM_CALLS = 3


def build(role, paths, layout):
    kinds = {
        POLICY: {"model": {"router_aux_loss_coef": 0.1}, "checkpoint": {"asynchronous": True}},
        REFERENCE: {"optimizer": False},
        CRITIC: {"model_type": "value_model", "checkpoint": {"asynchronous": True}},
    }
    return build_engine(paths[role], backend="megatron", **kinds[role], **layout)


def call(role, engine, number, folder):
    """Train, save and infer; return the metrics and the outputs."""
    rows, metrics = shard(engine, make_batch(7, seed=number)), {}
    if role == POLICY:
        metrics = engine.train_batch(rows, policy_like_loss, calculate_entropy=True)
    elif role == CRITIC:
        metrics = engine.train_batch(rows, value_loss)
    if metrics and number == 1:
        engine.save_checkpoint(folder / role)
    [output] = engine.infer_batch(rows).batch.values()
    return metrics, output.values().clone()


def run_together(paths, layout, other_layout, order, folder):
    """Interleave the calls of all roles, of which the first of `order` is closed before the last call."""
    num_groups = len(dist.distributed_c10d._world.pg_map)
    torch.manual_seed(5)
    engines, seeds = {}, []
    for role in paths:
        engines[role] = build(role, paths, layout)
        seeds.append(torch.initial_seed())
    assert len(set(seeds)) == 1  # later engines do not reset the random state of the first one
    results = {role: [] for role in paths}
    for number in range(NUM_CALLS):
        if number == NUM_CALLS - 1:
            engines.pop(order[0]).close()
        for role, engine in engines.items():
            results[role].append(call(role, engine, number, folder))
    with pytest.raises(RuntimeError, match=rf"must have the same layout; this one has .*{TP} = \d instead of \d"):
        build(REFERENCE, paths, other_layout)
    for role in order[1:]:
        call(role, engines[role], 0, folder)
        engines.pop(role).close()
    assert len(dist.distributed_c10d._world.pg_map) == num_groups
    return results


def run_alone(paths, layout, folder):
    results = {}
    for role in paths:
        engine = build(role, paths, layout)
        results[role] = [call(role, engine, number, folder) for number in range(NUM_CALLS)]
        engine.close()
    return results


def run_cases(paths, folder):
    out = []
    for name, order in (("tp", [POLICY, CRITIC, REFERENCE]), ("pp", [CRITIC, REFERENCE, POLICY])):
        layout, other = LAYOUTS[name], LAYOUTS["pp" if name == "tp" else "tp"]
        together = run_together(paths, layout, other, order, folder / f"{name}_together")
        out.append((together, run_alone(paths, layout, folder / f"{name}_alone")))
    return out


def test_engines_of_one_layout_share_a_process_as_if_alone(tmp_path):
    dense = tiny_model(tmp_path / "dense", "qwen3", num_hidden_layers=4, vocab_size=VOCAB)
    moe = tiny_model(tmp_path / "moe", "qwen3_moe", num_hidden_layers=4, vocab_size=VOCAB)
    paths = {REFERENCE: dense, POLICY: moe, CRITIC: dense}
    for cases in run_ranks(run_cases, 2, paths, tmp_path, timeout_s=100):
        for together, alone in cases:
            for role, calls in together.items():
                assert len(calls) >= NUM_CALLS - 1
                for (metrics, output), (expected_metrics, expected) in zip(calls, alone[role], strict=False):
                    assert metrics == expected_metrics, role
                    assert torch.equal(output, expected), role
