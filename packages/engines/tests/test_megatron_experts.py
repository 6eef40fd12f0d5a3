"""Products of all experts at once against one after another."""

from typing import Any

import pytest
import torch
from tidemill_testing import run_ranks, tiny_model

pytest.importorskip("megatron.core")

from tidemill_engines.megatron.patches.experts import Matrices, Rows, as_one, grouped_linear


def _devices() -> list[str]:
    return ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]


COUNTS = [[3, 0, 5, 1], [0, 0, 9, 0], [0, 0, 0, 0], [40, 7, 1, 300]]


@pytest.mark.parametrize("device", _devices())
@pytest.mark.parametrize("counts", COUNTS)
def test_products_at_once_equal_those_one_after_another(device, counts):
    torch.manual_seed(0)
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    x = torch.randn(sum(counts), 16, device=device, dtype=dtype, requires_grad=True)
    weights = [torch.randn(24, 16, device=device, dtype=dtype, requires_grad=True) for _ in counts]
    rows = Rows.of(counts, x.device)
    direction = torch.randn(sum(counts), 24, device=device, dtype=dtype)

    def grads(out: torch.Tensor) -> list[torch.Tensor]:
        return [out, *torch.autograd.grad((out * direction).sum(), [x, *weights])]

    one_by_one = torch.cat([rows @ weight.T for rows, weight in zip(x.split(counts), weights, strict=True)])
    tolerance = 1e-5 if device == "cpu" else 2e-2
    for actual, expected in zip(grads(grouped_linear(x, rows, Matrices(weights))), grads(one_by_one), strict=True):
        torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("device", _devices())
@pytest.mark.parametrize("counts", COUNTS)
def test_gradients_are_added_where_megatron_keeps_them(device, counts):
    torch.manual_seed(0)
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    space = torch.randn(len(counts), 24 * 16 + 64, device=device, dtype=dtype)
    kept = torch.randn(len(counts), 24 * 16 + 64, device=device)
    before = kept.clone()
    weights: list[Any] = [row[: 24 * 16].view(24, 16).requires_grad_() for row in space]
    for weight, row in zip(weights, kept, strict=True):
        weight.main_grad = row[: 24 * 16].view(24, 16)
    x = torch.randn(sum(counts), 16, device=device, dtype=dtype, requires_grad=True)
    rows = Rows.of(counts, x.device)
    direction = torch.randn(sum(counts), 24, device=device, dtype=dtype)
    apart = [weight.detach().clone().requires_grad_() for weight in weights]
    expected = torch.autograd.grad((grouped_linear(x, rows, Matrices(apart)) * direction).sum(), [x, *apart])
    out = grouped_linear(x, rows, Matrices(weights), lambda target, value: target.add_(value))
    grads = torch.autograd.grad((out * direction).sum(), [x, *weights], allow_unused=True)
    assert grads[1:] == (None,) * len(counts)
    torch.testing.assert_close(grads[0], expected[0])
    added = [weight.main_grad - row[: 24 * 16].view(24, 16) for weight, row in zip(weights, before, strict=True)]
    torch.testing.assert_close(added, [grad.float() for grad in expected[1:]], atol=1e-5, rtol=1e-5)
    assert torch.equal(kept[:, 24 * 16 :], before[:, 24 * 16 :])


def test_what_lies_at_equal_distances_is_seen_as_one():
    space = torch.arange(60.0)
    rows = [space[4 + 10 * number :][:6].view(2, 3) for number in range(5)]
    one = as_one(rows)
    assert one is not None
    assert torch.equal(one, torch.stack(rows))
    one.zero_()
    assert not rows[3].any()
    for others in (rows[::-1], rows[:2] + rows[3:], [*rows[:4], rows[4].clone()], [row.T for row in rows]):
        assert as_one(others) is None


OVERLAPPED = {"overlap_grad_reduce": True}
WAYS: dict[str, tuple[dict[str, bool], bool]] = {  # settings, and whether layers are recomputed
    "by autograd": ({}, False),
    "at once": ({}, False),
    "overlapped": (OVERLAPPED, False),
    "recomputed": ({}, True),
    "overlapped and recomputed": (OVERLAPPED, True),
    "offloaded": ({"param_offload": True, "grad_offload": True, "optimizer_offload": True}, False),
}


def train_in_bfloat16(folder: str) -> list[Any]:
    """Of ways to add up gradients: whether experts lie as one, and metrics and weights after two steps."""
    from engine_cases import make_batch, shard
    from mixture_cases import build
    from tidemill_engines import sft_loss
    from tidemill_engines.megatron.patches.experts import GroupedExperts

    seen = []
    for way, (settings, recomputed) in WAYS.items():
        engine = build(
            folder,
            {"param_dtype": "bfloat16", "max_token_len_per_gpu": 30, **settings},
            router_aux_loss_coef=0.0,
            gradient_checkpointing=recomputed,
        )
        mixtures = [module for module in engine.chunks[0].modules() if isinstance(module, GroupedExperts)]
        for experts in mixtures if way == "by autograd" else ():
            experts.adds_gradients = False
        metrics = [engine.train_batch(shard(engine, make_batch(8, seed=seed)), sft_loss) for seed in (1, 2)]
        lie_as_one = []
        with engine.train_mode():
            for experts in mixtures:
                for name in ("linear_fc1", "linear_fc2"):
                    weights = [getattr(expert, name).weight for expert in experts.local_experts]
                    lie_as_one += [as_one(weights), as_one([weight.main_grad for weight in weights])]
            weights = dict(engine.get_per_tensor_param())
        seen.append((all(one is not None for one in lie_as_one) and len(lie_as_one), metrics, weights))
        engine.close()
    return seen


@pytest.mark.parametrize("world_size", [1, 2])
def test_experts_lie_as_one_in_megatrons_buffers_and_train_in_any_way(tmp_path, world_size):
    from engine_cases import VOCAB

    folder = tiny_model(tmp_path, "qwen3_moe", vocab_size=VOCAB, num_hidden_layers=2)
    for by_autograd, *others in run_ranks(train_in_bfloat16, world_size, str(folder), timeout_s=120):
        for way, (lie_as_one, metrics, weights) in zip(list(WAYS)[1:], others, strict=True):
            assert lie_as_one == by_autograd[0] == 8
            for step, expected in zip(metrics, by_autograd[1], strict=True):
                assert step == pytest.approx(expected, rel=1e-3), way
            for name, weight in by_autograd[2].items():
                torch.testing.assert_close(weights[name], weight, msg=f"{way} {name}")
