"""Attention of context-parallel ranks on their parts of rows, in one process."""

import pytest
import torch
from tidemill_engines.attention.packed import varlen_padded
from tidemill_engines.model_io import PackedLayout

pytest.importorskip("megatron.core")

from tidemill_engines.megatron.parallel.context_parallel import PartLayout, _padded, own_tokens


@pytest.mark.parametrize("size", [2, 3, 4])
def test_ranks_together_equal_attention_on_whole_rows(size):
    torch.manual_seed(0)
    lengths = [2 * size * n for n in (1, 5, 2, 9)]
    q, direction = (torch.randn(sum(lengths), 4, 8) for _ in range(2))
    k, v = (torch.randn(sum(lengths), 2, 8) for _ in range(2))

    def grads(inputs: list[torch.Tensor], out: torch.Tensor) -> list[torch.Tensor]:
        return [out, *torch.autograd.grad((out * direction).sum(), inputs)]

    inputs = [x.clone().requires_grad_() for x in (q, k, v)]
    whole = PackedLayout.from_lengths(torch.tensor(lengths), q.device)
    expected = grads(inputs, varlen_padded(*inputs, whole, 0.3, None))

    inputs = [x.clone().requires_grad_() for x in (q, k, v)]
    own = [own_tokens(lengths, size, rank) for rank in range(size)]
    assert torch.equal(torch.cat(own).sort().values, torch.arange(sum(lengths)))
    gathered = [x[torch.cat(own)] for x in inputs[1:]]
    parts, pairs = [], []
    for rank in range(size):
        layout = PartLayout.from_lengths(lengths, size, rank, q.device)
        keys, values = (x[layout.keys] for x in gathered)
        parts.append(_padded(inputs[0][own[rank]], keys, values, layout, 0.3))
        queries, seen = layout.cu_seqlens_q.diff(), layout.cu_seqlens_k.diff()
        pairs.append(int((queries * seen - queries * (queries - 1) // 2).sum()))
    out = torch.cat(parts)[torch.cat(own).argsort()]
    for actual, truth in zip(grads(inputs, out), expected, strict=True):
        torch.testing.assert_close(actual, truth)
    assert len(set(pairs)) == 1  # all ranks have the same work
    assert sum(pairs) == sum(length * (length + 1) // 2 for length in lengths)  # and together no more than one rank


def test_one_rank_supports_rows_of_any_length():
    assert own_tokens([3, 1, 5], 1, 0).tolist() == list(range(9))
