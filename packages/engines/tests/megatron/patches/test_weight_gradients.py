"""Weight gradients that a matrix product accumulates in float32."""

import pytest
import torch

pytest.importorskip("megatron.core")

from tidemill_engines.megatron.patches.weight_gradients import WeightGradients


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("num_tokens", [1, 700, 4096])
def test_product_accumulates_in_float32(num_tokens):
    torch.manual_seed(0)
    x, grad = (torch.randn(num_tokens, size, device="cuda", dtype=torch.bfloat16) for size in (384, 640))
    buffer = torch.randn(2, 640, 384, device="cuda")
    expected = buffer[1].double() + grad.double().T @ x.double()
    other = buffer[0].clone()
    WeightGradients.wgrad_gemm_accum_fp32(x, grad, buffer[1])
    torch.testing.assert_close(buffer[1].double(), expected, rtol=1e-4, atol=1e-3)
    assert torch.equal(buffer[0], other)
