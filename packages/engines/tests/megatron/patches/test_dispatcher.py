"""Permutation of tokens by expert, compared with Megatron's own functions."""

import pytest
import torch

pytest.importorskip("megatron.core")

from megatron.core.transformer.moe import moe_utils
from tidemill_engines.megatron.patches.compiled import compile_for_any_length
from tidemill_engines.megatron.patches.dispatcher import (
    LocalCopies,
    Permutation,
    permute,
    reorder,
    sum_copies,
    transposed_runs,
    unpermute,
)

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


def test_permute_and_unpermute_equal_megatrons(device):
    routing_map = _routing_map(device)
    tokens = torch.randn(TOKENS, HIDDEN, device=device, requires_grad=True)
    factors = torch.randn(TOKENS * TOP_K, 1, device=device)
    direction = torch.randn(TOKENS, HIDDEN, device=device)
    permutation = Permutation.from_routing_map(routing_map, TOP_K)
    copies = permute(tokens, permutation)
    out = unpermute(copies * factors, permutation)
    [grad] = torch.autograd.grad((out * direction).sum(), tokens)
    tokens_and_experts = routing_map.T.nonzero()
    expected_copies, _, indices = moe_utils.permute(tokens, routing_map)
    expected = moe_utils.unpermute(expected_copies * factors, indices, tokens.shape)
    [expected_grad] = torch.autograd.grad((expected * direction).sum(), tokens)
    assert torch.equal(copies, expected_copies)
    assert torch.equal(permutation.slots, tokens_and_experts[:, 1] * EXPERTS + tokens_and_experts[:, 0])
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(grad, expected_grad)


@pytest.mark.parametrize("first", [0, 2, 4, 6])
def test_local_copies_are_those_of_the_routing_map_of_a_ranks_experts(device, first):
    routing_map = _routing_map(device)
    experts = routing_map.nonzero()[:, 1].view(TOKENS, TOP_K)
    permutation, counts = LocalCopies(experts, first, 2).wait()
    local = routing_map[:, first : first + 2]
    tokens = torch.randn(TOKENS, HIDDEN, device=device)
    expected, _, indices = moe_utils.permute(tokens, local)
    assert torch.equal(counts, local.sum(0).cpu())
    copies = permute(tokens, permutation)
    assert torch.equal(copies, expected)
    torch.testing.assert_close(
        unpermute(copies, permutation), moe_utils.unpermute(expected, indices, tokens.shape, routing_map=local)
    )
    numbers = torch.arange(first, first + 2, device=device).repeat_interleave(counts.to(device))
    assert torch.equal(experts.flatten()[permutation.slots], numbers)


def test_a_rank_whose_experts_have_no_token_adds_nothing(device):
    experts = torch.zeros(TOKENS, 1, dtype=torch.int64, device=device)
    permutation, counts = LocalCopies(experts, 5, 3).wait()
    assert counts.tolist() == [0, 0, 0]
    tokens = torch.randn(TOKENS, HIDDEN, device=device, requires_grad=True)
    out = unpermute(permute(tokens, permutation), permutation)
    out.sum().backward()
    assert not out.any()
    assert not tokens.grad.any()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="compiling for a CPU is slow")
def test_the_compiled_sum_equals_that_of_torch():
    device, compiled = torch.device("cuda"), compile_for_any_length(sum_copies)
    for num_tokens in (TOKENS, 3 * TOKENS):
        experts = torch.rand(num_tokens, EXPERTS, device=device).topk(TOP_K, 1).indices
        permutation, counts = LocalCopies(experts, 2, 4).wait()
        copies = torch.randn(int(counts.sum()), HIDDEN, device=device, dtype=torch.bfloat16)
        assert torch.equal(compiled(copies, permutation.copies), sum_copies(copies, permutation.copies))


def test_reorder_sorts_received_tokens_by_expert_and_is_inverted(device):
    counts = torch.tensor([[3, 0, 5], [0, 0, 1], [2, 4, 0], [1, 0, 2]], device=device)
    rows = torch.randn(int(counts.sum()), HIDDEN, device=device, requires_grad=True)
    order, inverse = transposed_runs(counts, len(rows)), transposed_runs(counts.T, len(rows))
    direction = torch.randn_like(rows)
    out = reorder(rows, order, inverse)
    [grad] = torch.autograd.grad((out * direction).sum(), rows)
    indices = torch.arange(12).view(4, 3).T.flatten()
    expected, _ = moe_utils.sort_chunks_by_idxs(rows, counts.flatten(), indices)
    [expected_grad] = torch.autograd.grad((expected * direction).sum(), rows)
    assert torch.equal(out, expected)
    assert torch.equal(grad, expected_grad)
    assert torch.equal(reorder(out, inverse, order), rows)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_permutation_does_not_synchronize_the_device():
    device = torch.device("cuda")
    routing_map, counts = _routing_map(device), torch.tensor([[3, 0], [1, 2]], device=device)
    tokens = torch.randn(TOKENS, HIDDEN, device=device, requires_grad=True)
    torch.cuda.set_sync_debug_mode("error")
    try:
        permutation = Permutation.from_routing_map(routing_map, TOP_K)
        unpermute(permute(tokens, permutation), permutation).sum().backward()
        reorder(tokens[:6], transposed_runs(counts, 6), transposed_runs(counts.T, 6)).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
