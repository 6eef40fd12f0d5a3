"""The policy losses of tidemill-algorithms have the gradient of a plain computation in any layout and split.

A loss and an aggregation are a case. By default, each layout runs each loss with one aggregation, so that the layouts
of both backends cover all cases once; `slow` runs all cases in each layout.
"""

import numpy as np
import pytest
import torch
from engine_cases import (
    VOCAB,
    build_engine,
    make_batch,
    plain_distributions,
    plain_log_probs,
    plain_model,
    shard,
    weights_of,
)
from tidemill_algorithms import POLICY_LOSSES, ActorLoss, token_weights
from tidemill_dataproto import DataProto, ragged
from tidemill_engines import ModelOutput, Normalizer
from tidemill_testing import run_ranks, tiny_model

MODES = ["token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm", "seq-mean-token-mean", "prompt-mean"]
LAYOUTS = {
    "fsdp2": [
        {"micro_batch_size_per_gpu": 1},
        {"max_token_len_per_gpu": 30},
        {"max_token_len_per_gpu": 40, "ulysses_sequence_parallel_size": 2},
    ],
    "megatron": [
        {"micro_batch_size_per_gpu": 2, "pipeline_model_parallel_size": 2},
        {"max_token_len_per_gpu": 40, "context_parallel_size": 2},
    ],
}
# AdamW with a huge epsilon is plain gradient descent, here with a learning rate of 10.
DESCENT = {"lr": 1e7, "eps": 1e6, "betas": (0.0, 0.0), "clip_grad": float("inf"), "weight_decay": 0.0}
ALL_CASES = [(name, mode) for name in POLICY_LOSSES for mode in MODES]


def cases_of(backend, number):
    first = number if backend == "fsdp2" else number + len(LAYOUTS["fsdp2"])
    return [(name, MODES[(first + i) % len(MODES)]) for i, name in enumerate(POLICY_LOSSES)]


def loss_of(name):
    return ActorLoss(policy_loss=name, entropy_coeff=0.05, kl_loss_coef=0.1, kl_loss_type="k3+")


def make_policy_batch(model):
    """Create rows of three problems, whose policies differ from the model's, without weights of the loss."""
    batch = make_batch(9, seed=1)
    with torch.no_grad():
        log_probs = torch.cat([log_probs for log_probs, _ in plain_log_probs(model, batch)])
    generator = torch.Generator().manual_seed(0)
    for name in ("old_log_probs", "ref_log_prob"):
        noise = 0.3 * torch.randn(len(log_probs), generator=generator)
        batch.batch[name] = ragged.like(log_probs + noise, batch["responses"])
    with torch.no_grad():
        topk, ids = torch.cat(plain_distributions(model, batch)).topk(5)
    noise = -torch.rand(topk.shape, generator=generator)
    batch.batch["topk_ids"] = ragged.like(ids.int(), batch["responses"])
    batch.batch["teacher_topk_log_probs"] = ragged.like(topk + noise, batch["responses"])
    batch.non_tensor_batch["uid"] = np.array([f"problem {row % 3}" for row in range(9)], dtype=object)
    return batch


def weigh(batch, mode):
    weights = token_weights(
        batch["response_mask"],
        mode,
        uid=batch.non_tensor_batch["uid"] if mode == "prompt-mean" else None,
        loss_scale_factor=7.0 if mode == "seq-mean-token-sum-norm" else None,
    )
    return batch.union(DataProto.from_dict({"loss_weights": weights}))


def plain_steps(model, batch, cases):
    """Compute the loss and its metrics with the norm of the gradient, and the gradient, of each case.

    One forward of each row serves all cases.
    """
    mask = ragged.values(batch["response_mask"])
    normalizer = Normalizer(num_tokens=mask.sum().item(), num_sequences=1.0)
    log_probs, entropy = (torch.cat(column) for column in zip(*plain_log_probs(model, batch), strict=True))
    topk = torch.cat(plain_distributions(model, batch)).gather(-1, ragged.values(batch["topk_ids"]).long())
    output, steps = ModelOutput(log_probs=log_probs, entropy=entropy, topk_log_probs=topk), {}
    params = dict(model.named_parameters())
    for name, mode in cases:
        loss, metrics = loss_of(name)(output, weigh(batch, mode), normalizer)
        parts = torch.autograd.grad(loss, [*params.values()], retain_graph=True, materialize_grads=True)
        norm = torch.cat([part.flatten() for part in parts]).norm()
        values = {key: value.item() for key, value in {**metrics, "loss": loss, "grad_norm": norm}.items()}
        steps[name, mode] = values, dict(zip(params, parts, strict=True))
    return steps


def run_losses(backend, path, batch, cases_by_layout):
    out = []
    for layout, cases in zip(LAYOUTS[backend], cases_by_layout, strict=True):
        engine = build_engine(path, backend=backend, optimizer={"lr": 0.0}, **layout)
        steps = [
            engine.train_batch(shard(engine, weigh(batch, mode)), loss_of(name), calculate_entropy=True)
            for name, mode in cases
        ]
        engine.close()
        out.append((steps, descend(backend, path, batch, *cases[0], layout)))
    return out


def descend(backend, path, batch, name, mode, layout):
    """Return the gradients of the weights, from one step of gradient descent."""
    engine = build_engine(path, backend=backend, optimizer=DESCENT, **layout)
    before = weights_of(engine)
    engine.train_batch(shard(engine, weigh(batch, mode)), loss_of(name), calculate_entropy=True)
    after = weights_of(engine)
    engine.close()
    return {key: (weight - after[key]) * (DESCENT["eps"] / DESCENT["lr"]) for key, weight in before.items()}


def check_losses(backend, path, cases_by_layout):
    if backend == "megatron":
        pytest.importorskip("megatron.core")
    model = plain_model(tiny_model(path / "model", "qwen3", vocab_size=VOCAB))
    batch = make_policy_batch(model)
    expected = plain_steps(model, batch, sorted({case for cases in cases_by_layout for case in cases}))
    for of_rank in run_ranks(run_losses, 2, backend, path / "model", batch, cases_by_layout, timeout_s=250.0):
        for layout, cases, (steps, gradients) in zip(LAYOUTS[backend], cases_by_layout, of_rank, strict=True):
            for case, metrics in zip(cases, steps, strict=True):
                wanted, _ = expected[case]
                assert wanted["grad_norm"] > 1e-3
                actual = {name: metrics[name] for name in wanted}
                assert actual == pytest.approx(wanted, rel=1e-5, abs=1e-6), (layout, case)
            wanted, of_names = expected[cases[0]]
            error = torch.cat([(gradients[name] - gradient).flatten() for name, gradient in of_names.items()]).norm()
            assert error < 1e-5 * wanted["grad_norm"], (layout, cases[0])


@pytest.mark.parametrize("backend", sorted(LAYOUTS))
def test_policy_losses_do_not_depend_on_layout_and_split(tmp_path, backend):
    check_losses(backend, tmp_path, [cases_of(backend, number) for number in range(len(LAYOUTS[backend]))])


def test_layouts_cover_each_loss_with_each_aggregation():
    covered = [
        case for backend, layouts in LAYOUTS.items() for i in range(len(layouts)) for case in cases_of(backend, i)
    ]
    assert sorted(covered) == sorted(ALL_CASES)


@pytest.mark.slow
@pytest.mark.parametrize("backend", sorted(LAYOUTS))
def test_policy_losses_do_not_depend_on_layout_and_split_all_cases(tmp_path, backend):
    check_losses(backend, tmp_path, [ALL_CASES] * len(LAYOUTS[backend]))
