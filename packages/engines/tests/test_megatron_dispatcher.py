"""How the copies of tokens are moved to experts and back, against Megatron's own way."""

import pytest
import torch

pytest.importorskip("megatron.core")

from megatron.core.transformer.moe.moe_utils import permute, sort_chunks_by_idxs, unpermute
from tidemill_engines.megatron.patches.dispatcher import Places, copied, moved, summed, turned

TOKENS, EXPERTS, TOP_K, HIDDEN = 50, 8, 3, 16


@pytest.fixture(params=["cpu", *(["cuda"] if torch.cuda.is_available() else [])])
def device(request) -> torch.device:
    torch.manual_seed(0)
    return torch.device(request.param)


def _routing_map(device: torch.device) -> torch.Tensor:
    """Expert 2 has no token."""
    scores = torch.rand(TOKENS, EXPERTS, device=device)
    scores[:, 2] = -1
    return torch.zeros_like(scores, dtype=torch.bool).scatter(1, scores.topk(TOP_K, 1).indices, True)


@pytest.mark.parametrize("fused", [False, pytest.param(True, marks=pytest.mark.gpu)])
def test_copies_and_their_sums_are_megatrons(device, fused):
    if fused and device.type == "cpu":
        pytest.skip("compiling for a CPU takes long")
    routing_map = _routing_map(device)
    tokens = torch.randn(TOKENS, HIDDEN, device=device, requires_grad=True)
    factors = torch.randn(TOKENS * TOP_K, 1, device=device)
    direction = torch.randn(TOKENS, HIDDEN, device=device)
    places = Places.of(routing_map, TOP_K, fused=fused)
    copies = copied(tokens, places)
    out = summed(copies * factors, places)
    [grad] = torch.autograd.grad((out * direction).sum(), tokens)
    expected_copies, _, indices = permute(tokens, routing_map)
    expected = unpermute(expected_copies * factors, indices, tokens.shape)
    [expected_grad] = torch.autograd.grad((expected * direction).sum(), tokens)
    assert torch.equal(copies, expected_copies)
    assert torch.equal(places.experts, routing_map.T.nonzero()[:, 0])
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(grad, expected_grad)


def test_rows_of_several_ranks_are_sorted_by_expert_and_brought_back(device):
    counts = torch.tensor([[3, 0, 5], [0, 0, 1], [2, 4, 0], [1, 0, 2]], device=device)
    rows = torch.randn(int(counts.sum()), HIDDEN, device=device, requires_grad=True)
    order, back = turned(counts, len(rows)), turned(counts.T, len(rows))
    direction = torch.randn_like(rows)
    out = moved(rows, order, back)
    [grad] = torch.autograd.grad((out * direction).sum(), rows)
    expected, _ = sort_chunks_by_idxs(rows, counts.flatten(), torch.arange(12).view(4, 3).T.flatten())
    [expected_grad] = torch.autograd.grad((expected * direction).sum(), rows)
    assert torch.equal(out, expected)
    assert torch.equal(grad, expected_grad)
    assert torch.equal(moved(out, back, order), rows)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_device_is_not_asked_for_anything():
    device = torch.device("cuda")
    routing_map, counts = _routing_map(device), torch.tensor([[3, 0], [1, 2]], device=device)
    tokens = torch.randn(TOKENS, HIDDEN, device=device, requires_grad=True)
    torch.cuda.set_sync_debug_mode("error")
    try:
        places = Places.of(routing_map, TOP_K)
        summed(copied(tokens, places), places).sum().backward()
        moved(tokens[:6], turned(counts, 6), turned(counts.T, 6)).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
