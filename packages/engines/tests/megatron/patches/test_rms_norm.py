"""RMS norm compiled by torch.compile, compared with torch's."""

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("megatron.core")

from tidemill_engines.megatron.patches.rms_norm import _RMSNorm, rms_norm

EPS = 1e-6


def _check(norm, shape: tuple[int, ...], *, device: str, dtype: torch.dtype, tolerance: float) -> None:
    """The input is a slice of a wider tensor, like the heads of queries and keys."""
    wide = torch.randn(*shape[:-1], 3 * shape[-1], device=device, dtype=dtype)
    x = wide[..., shape[-1] : 2 * shape[-1]].requires_grad_()
    weight = torch.randn(shape[-1], device=device, dtype=dtype, requires_grad=True)
    direction = torch.randn(shape, device=device, dtype=dtype)
    out, expected = norm(x, weight), F.rms_norm(x.double(), (shape[-1],), weight.double(), EPS)
    grads = torch.autograd.grad((out * direction).sum(), [x, weight])
    expected_grads = torch.autograd.grad((expected * direction.double()).sum(), [x, weight])
    for actual, truth in zip((out, *grads), (expected, *expected_grads), strict=True):
        error = ((actual.double() - truth.double()).norm() / truth.double().norm()).item()
        assert error < tolerance, f"{shape}: {error}"


@pytest.mark.parametrize("shape", [(33, 1, 64), (1, 1, 64), (33, 1, 4, 16)])
def test_rms_norm_equals_torchs(shape):
    torch.manual_seed(0)
    _check(lambda x, w: _RMSNorm.apply(x, w, EPS, False), shape, device="cpu", dtype=torch.float32, tolerance=1e-6)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 5e-3)])
def test_compiled_rms_norm_equals_torchs(dtype, tolerance):
    torch.manual_seed(0)
    for shape in ((700, 1, 2560), (8192, 1, 2560), (700, 1, 8, 128), (8192, 1, 8, 128), (1333, 1, 2560), (1, 1, 2560)):
        _check(lambda x, w: rms_norm(x, w, EPS), shape, device="cuda", dtype=dtype, tolerance=tolerance)
