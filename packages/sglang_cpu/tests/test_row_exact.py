"""Matrix products whose rows do not depend on the batch."""

import pytest
import torch
from tidemill_sglang_cpu import row_exact


@pytest.fixture
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("inner", "outer"), [(128, 384), (384, 128), (96, 100), (1024, 64)])
def test_rows_are_bitwise_independent_of_the_batch(one_thread, dtype, inner, outer):
    torch.manual_seed(0)
    weight = torch.randn(outer, inner).to(dtype).t()  # as torch.nn.functional.linear passes it
    bias = torch.randn(outer).to(dtype)
    rows = torch.randn(90, inner).to(dtype)
    product, shifted = row_exact.mm(rows, weight), row_exact.addmm(bias, rows, weight)
    for begin, end in [(0, 1), (1, 3), (5, 12), (13, 30), (31, 90), (88, 89)]:
        part = rows[begin:end].clone()
        assert torch.equal(row_exact.mm(part, weight), product[begin:end])
        assert torch.equal(row_exact.addmm(bias, part, weight), shifted[begin:end])


def test_products_equal_torch():
    a, b, bias = torch.randn(5, 7), torch.randn(7, 3), torch.randn(3)
    torch.testing.assert_close(row_exact.mm(a, b), torch.mm(a, b))
    torch.testing.assert_close(
        row_exact.addmm(bias, a, b, beta=0.5, alpha=2.0), torch.addmm(bias, a, b, beta=0.5, alpha=2.0)
    )
    assert row_exact.mm(torch.empty(0, 7), b).shape == (0, 3)
