"""Products of all experts at once against one after another."""

import pytest
import torch

pytest.importorskip("megatron.core")

from tidemill_engines.megatron.experts import grouped_linear


def _devices() -> list[str]:
    return ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]


@pytest.mark.parametrize("device", _devices())
@pytest.mark.parametrize("counts", [[3, 0, 5, 1], [0, 0, 9, 0], [0, 0, 0, 0], [40, 7, 1, 300]])
def test_products_at_once_equal_those_one_after_another(device, counts):
    torch.manual_seed(0)
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    x = torch.randn(sum(counts), 16, device=device, dtype=dtype, requires_grad=True)
    weights = [torch.randn(24, 16, device=device, dtype=dtype, requires_grad=True) for _ in counts]
    direction = torch.randn(sum(counts), 24, device=device, dtype=dtype)

    def grads(out: torch.Tensor) -> list[torch.Tensor]:
        return [out, *torch.autograd.grad((out * direction).sum(), [x, *weights])]

    one_by_one = torch.cat([rows @ weight.T for rows, weight in zip(x.split(counts), weights, strict=True)])
    tolerance = 1e-5 if device == "cpu" else 2e-2
    for actual, expected in zip(grads(grouped_linear(x, counts, weights)), grads(one_by_one), strict=True):
        torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)
