"""Grouped matrix products of all experts, compared with one product per expert."""

from typing import Any

import pytest
import torch
from tidemill_testing import run_ranks, tiny_model

pytest.importorskip("megatron.core")

from tidemill_engines.megatron.patches.experts import ExpertRows, ExpertWeights, as_stacked_view, grouped_linear


def _devices() -> list[str]:
    return ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]


COUNTS = [[3, 0, 5, 1], [0, 0, 9, 0], [0, 0, 0, 0], [40, 7, 1, 300]]


@pytest.mark.parametrize("device", _devices())
@pytest.mark.parametrize("counts", COUNTS)
def test_grouped_linear_equals_one_product_per_expert(device, counts):
    torch.manual_seed(0)
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    x = torch.randn(sum(counts), 16, device=device, dtype=dtype, requires_grad=True)
    weights = [torch.randn(24, 16, device=device, dtype=dtype, requires_grad=True) for _ in counts]
    rows = ExpertRows.from_counts(counts, x.device)
    direction = torch.randn(sum(counts), 24, device=device, dtype=dtype)

    def grads(out: torch.Tensor) -> list[torch.Tensor]:
        return [out, *torch.autograd.grad((out * direction).sum(), [x, *weights])]

    one_by_one = torch.cat([rows @ weight.T for rows, weight in zip(x.split(counts), weights, strict=True)])
    grouped = grouped_linear(x, rows, ExpertWeights(weights))
    tolerance = 1e-5 if device == "cpu" else 2e-2
    for actual, expected in zip(grads(grouped), grads(one_by_one), strict=True):
        torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("device", _devices())
@pytest.mark.parametrize("counts", COUNTS)
def test_grouped_linear_accumulates_gradients_in_main_grad(device, counts):
    torch.manual_seed(0)
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    space = torch.randn(len(counts), 24 * 16 + 64, device=device, dtype=dtype)
    buffer = torch.randn(len(counts), 24 * 16 + 64, device=device)
    before = buffer.clone()
    weights: list[Any] = [row[: 24 * 16].view(24, 16).requires_grad_() for row in space]
    for weight, row in zip(weights, buffer, strict=True):
        weight.main_grad = row[: 24 * 16].view(24, 16)
    x = torch.randn(sum(counts), 16, device=device, dtype=dtype, requires_grad=True)
    rows = ExpertRows.from_counts(counts, x.device)
    direction = torch.randn(sum(counts), 24, device=device, dtype=dtype)
    copies = [weight.detach().clone().requires_grad_() for weight in weights]
    out = grouped_linear(x, rows, ExpertWeights(copies))
    expected = torch.autograd.grad((out * direction).sum(), [x, *copies])
    out = grouped_linear(x, rows, ExpertWeights(weights), lambda target, value: target.add_(value))
    grads = torch.autograd.grad((out * direction).sum(), [x, *weights], allow_unused=True)
    assert grads[1:] == (None,) * len(counts)
    torch.testing.assert_close(grads[0], expected[0])
    added = [weight.main_grad - row[: 24 * 16].view(24, 16) for weight, row in zip(weights, before, strict=True)]
    torch.testing.assert_close(added, [grad.float() for grad in expected[1:]], atol=1e-5, rtol=1e-5)
    assert torch.equal(buffer[:, 24 * 16 :], before[:, 24 * 16 :])


def test_as_stacked_view_requires_equal_distances():
    space = torch.arange(60.0)
    rows = [space[4 + 10 * number :][:6].view(2, 3) for number in range(5)]
    view = as_stacked_view(rows)
    assert view is not None
    assert torch.equal(view, torch.stack(rows))
    view.zero_()
    assert not rows[3].any()
    for others in (rows[::-1], rows[:2] + rows[3:], [*rows[:4], rows[4].clone()], [row.T for row in rows]):
        assert as_stacked_view(others) is None


OVERLAPPED = {"overlap_grad_reduce": True}
WAYS: dict[str, tuple[dict[str, bool], bool]] = {  # settings, and whether layers are recomputed
    "autograd": ({}, False),
    "in place": ({}, False),
    "overlapped": (OVERLAPPED, False),
    "recomputed": ({}, True),
    "overlapped and recomputed": (OVERLAPPED, True),
    "offloaded": ({"param_offload": True, "grad_offload": True, "optimizer_offload": True}, False),
}


def train_in_bfloat16(folder: str) -> list[Any]:
    """For each way to accumulate gradients: number of stacked views, and metrics and weights after two steps."""
    from engine_cases import make_batch, shard
    from moe_cases import build
    from tidemill_engines import sft_loss
    from tidemill_engines.megatron.patches.experts import GroupedExperts

    results = []
    for way, (settings, recomputed) in WAYS.items():
        engine = build(
            folder,
            {"param_dtype": "bfloat16", "max_token_len_per_gpu": 30, **settings},
            router_aux_loss_coef=0.0,
            gradient_checkpointing=recomputed,
        )
        layers = [module for module in engine.chunks[0].modules() if isinstance(module, GroupedExperts)]
        for experts in layers if way == "autograd" else ():
            experts.accumulates_gradients = False
        metrics = [engine.train_batch(shard(engine, make_batch(8, seed=seed)), sft_loss) for seed in (1, 2)]
        views = []
        with engine.train_mode():
            for experts in layers:
                for name in ("linear_fc1", "linear_fc2"):
                    weights = [getattr(expert, name).weight for expert in experts.local_experts]
                    views += [as_stacked_view(weights), as_stacked_view([weight.main_grad for weight in weights])]
            weights = dict(engine.get_per_tensor_param())
        results.append((all(view is not None for view in views) and len(views), metrics, weights))
        engine.close()
    return results


@pytest.mark.parametrize("world_size", [1, 2])
def test_experts_are_stacked_in_megatrons_buffers_and_train_equally_in_all_ways(tmp_path, world_size):
    from engine_cases import VOCAB

    folder = tiny_model(tmp_path, "qwen3_moe", vocab_size=VOCAB, num_hidden_layers=2)
    for autograd, *others in run_ranks(train_in_bfloat16, world_size, str(folder), timeout_s=120):
        for way, (num_views, metrics, weights) in zip(list(WAYS)[1:], others, strict=True):
            assert num_views == autograd[0] == 8
            for step, expected in zip(metrics, autograd[1], strict=True):
                assert step == pytest.approx(expected, rel=1e-3), way
            for name, weight in autograd[2].items():
                torch.testing.assert_close(weights[name], weight, msg=f"{way} {name}")
