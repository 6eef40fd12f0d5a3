"""Packed attention on the CPU against attention of each row."""

import pytest
import torch
from tidemill_engines.attention.packed import varlen_attention_forward
from tidemill_engines.model_io import PackedLayout

CPU = torch.device("cpu")


def per_row_attention(q, k, v, lengths, window, scaling):
    """Compute softmax attention row by row and head by head; q [N, H, D], k and v [N, H_kv, D]."""
    out, start = [], 0
    group = q.shape[1] // k.shape[1]
    for length in lengths:
        rows = slice(start, start + length)
        i, j = torch.arange(length)[:, None], torch.arange(length)[None, :]
        seen = (j <= i) & (i - j < (length if window is None else window))
        heads = []
        for head in range(q.shape[1]):
            scores = q[rows, head] @ k[rows, head // group].T * scaling
            heads.append(scores.masked_fill(~seen, -torch.inf).softmax(-1) @ v[rows, head // group])
        out.append(torch.stack(heads, 1))
        start += length
    return torch.cat(out)


@pytest.mark.parametrize("lengths", [[1], [5, 1, 9, 2], [4, 4, 4]])
@pytest.mark.parametrize("window", [None, 3, 100])
@pytest.mark.parametrize("kv_heads", [2, 4])
def test_packed_attention_equals_attention_of_each_row(lengths, window, kv_heads):
    torch.manual_seed(0)
    total = sum(lengths)
    q = torch.randn(total, 4, 8, dtype=torch.float64, requires_grad=True)
    k, v = (torch.randn(total, kv_heads, 8, dtype=torch.float64, requires_grad=True) for _ in range(2))
    layout = PackedLayout.from_lengths(torch.tensor(lengths), CPU)
    assert layout.cu_seqlens.tolist() == [0, *torch.tensor(lengths).cumsum(0).tolist()]
    heads_first = [x.transpose(0, 1)[None] for x in (q, k, v)]
    out, weights = varlen_attention_forward(
        torch.nn.Identity(), *heads_first, None, scaling=0.3, sliding_window=window, tidemill_layout=layout
    )
    assert weights is None
    expected = per_row_attention(q, k, v, lengths, window, 0.3)
    torch.testing.assert_close(out[0], expected, rtol=1e-9, atol=1e-9)
    direction = torch.randn_like(expected)
    actual_grads = torch.autograd.grad((out[0] * direction).sum(), (q, k, v))
    for actual, plain in zip(actual_grads, torch.autograd.grad((expected * direction).sum(), (q, k, v)), strict=True):
        torch.testing.assert_close(actual, plain, rtol=1e-8, atol=1e-9)


def test_packed_attention_rejects_mask():
    x = torch.randn(1, 2, 3, 4)
    layout = PackedLayout.from_lengths(torch.tensor([3]), CPU)
    with pytest.raises(ValueError, match="without an attention mask"):
        varlen_attention_forward(torch.nn.Identity(), x, x, x, torch.ones(1, 1, 3, 3), tidemill_layout=layout)
