"""Log-probabilities of the most probable and of given ids against full logits, softmax and autograd."""

import pytest
import torch
import torch.distributed as dist
from head_cases import CASES, DEVICES, Allocations, M, V, gradients, make, plain
from tidemill_engines.head.log_probs import Head, head_log_probs
from tidemill_testing import run_ranks

K = 4


def draw_ids(num_tokens, *, vocab_size=V, k=K, seed=3):
    generator = torch.Generator().manual_seed(seed)
    return torch.stack([torch.randperm(vocab_size, generator=generator)[:k] for _ in range(num_tokens)])


def plain_topk(hidden, head, ids, *, temperature=1.0):
    """Compute the log-probabilities [M, k] of ids, one column at a time."""
    return torch.stack([plain(hidden, head, column, temperature=temperature)[0] for column in ids.unbind(1)], 1)


@pytest.mark.parametrize("chunk_columns", [1, 5, V, 1000])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-9)])
@pytest.mark.parametrize("device", DEVICES)
def test_given_ids_equal_the_plain_computation(device, dtype, tolerance, case, chunk_columns):
    settings = dict(CASES[case])
    temperature = settings.pop("temperature", 1.0)
    hidden, head, labels = make(dtype, device=device, **settings)
    ids = draw_ids(M).to(device)
    ids[0, 1] = labels[0]  # the label can be one of them
    ids[0, 2:] = (labels[0] + torch.arange(1, 3, device=device)) % V
    ids[0, 0] = (labels[0] + 3) % V
    actual = head_log_probs(
        hidden,
        head,
        labels,
        temperature=temperature,
        entropy=True,
        topk_ids=ids.int(),
        chunk_bytes=chunk_columns * M * dtype.itemsize,
    )
    assert actual.topk_ids is not None
    assert actual.topk_ids.dtype == torch.int32
    assert torch.equal(actual.topk_ids.long(), ids)
    log_probs, entropy = plain(hidden, head, labels, temperature=temperature)
    topk = plain_topk(hidden, head, ids, temperature=temperature)
    inputs = [hidden, head.weight, *([] if head.bias is None else [head.bias])]
    pairs = [(actual.topk_log_probs, topk)]
    for ours, theirs in (  # alone, and together with the other outputs
        ([actual.topk_log_probs], [topk]),
        ([actual.topk_log_probs, actual.log_probs, actual.entropy], [topk, log_probs, entropy]),
    ):
        pairs += [*zip(gradients(ours, inputs), gradients(theirs, inputs), strict=True)]
    for ours, theirs in pairs:
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("k", [1, K, V])
@pytest.mark.parametrize("chunk_columns", [1, 5, V])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("device", DEVICES)
def test_most_probable_ids_are_those_of_the_full_softmax(device, case, chunk_columns, k):
    settings = dict(CASES[case])
    temperature = settings.pop("temperature", 1.0)
    hidden, head, labels = make(torch.float64, device=device, **settings)
    actual = head_log_probs(hidden, head, labels, temperature=temperature, top_k=k, chunk_bytes=chunk_columns * M * 8)
    all_ids = torch.arange(V, device=device).expand(M, V)
    log_probs, ids = plain_topk(hidden, head, all_ids, temperature=temperature).topk(k)
    assert torch.equal(actual.topk_ids, ids.int())
    torch.testing.assert_close(actual.topk_log_probs, log_probs, rtol=1e-9, atol=1e-9)


def test_gradients_of_given_ids_equal_finite_differences():
    hidden, head, labels = make(torch.float64, num_tokens=3, bias=True, softcap=3.0)
    ids = draw_ids(3)

    def run(hidden, weight, bias):
        head = Head(weight=weight, bias=bias, softcap=3.0)
        return head_log_probs(hidden, head, labels, temperature=0.7, topk_ids=ids, chunk_bytes=1).topk_log_probs

    assert torch.autograd.gradcheck(run, (hidden, head.weight, head.bias))


@pytest.mark.parametrize("device", DEVICES)
def test_small_difference_of_distributions_is_exact_with_a_bfloat16_head(device):
    """The gradient p - p_teacher of a logit is not the difference of two rounded numbers."""
    hidden, head, labels = make(torch.bfloat16, num_tokens=64, device=device)
    ids = torch.arange(V, device=device).expand(64, V)
    exact = plain_topk(hidden.double(), Head(weight=head.weight.double()), ids)
    teacher = (exact.detach() + 1e-3 * torch.randn(64, V, device=device)).softmax(-1)
    actual = head_log_probs(hidden, head, labels, topk_ids=ids).topk_log_probs
    (ours,) = torch.autograd.grad(-(teacher * actual).sum(), [hidden])
    (theirs,) = torch.autograd.grad(-(teacher * exact).sum(), [hidden])
    assert ((ours.double() - theirs.double()).norm() / theirs.double().norm()).item() < 0.01


def test_memory_is_independent_of_vocabulary_size_with_top_k():
    num_tokens, vocab_size = 256, 4096
    chunk_bytes = num_tokens * 16 * 4
    hidden, weight = torch.randn(num_tokens, 4).requires_grad_(), torch.randn(vocab_size, 4).requires_grad_()
    labels = torch.randint(0, vocab_size, (num_tokens,))
    with Allocations() as seen:
        head = Head(weight=weight)
        ids = head_log_probs(hidden.detach(), head, labels, top_k=K, chunk_bytes=chunk_bytes).topk_ids
        assert ids is not None
        log_probs = head_log_probs(hidden, head, labels, topk_ids=ids, chunk_bytes=chunk_bytes).topk_log_probs
        assert log_probs is not None
        log_probs.sum().backward()
    weight_bytes, k_bytes = vocab_size * 4 * 4, num_tokens * 2 * K * 8
    assert seen.largest_bytes <= max(weight_bytes, k_bytes)
    assert seen.peak_bytes < num_tokens * vocab_size * 4 / 10


def test_no_tokens():
    hidden, head, labels = make(torch.float32)
    assert head_log_probs(hidden[:0], head, labels[:0], top_k=K).topk_ids.shape == (0, K)
    out = head_log_probs(hidden[:0], head, labels[:0], topk_ids=draw_ids(M)[:0])
    (grad,) = torch.autograd.grad(out.topk_log_probs.sum(), [head.weight])
    assert not grad.any()


def _divided(size: int) -> list[float]:
    """Return the largest differences of ids, log-probs and gradients from those of the full head."""
    rows = -(-V // size)
    first = dist.get_rank() * rows
    own_rows = max(0, min(rows, V - first))
    hidden, head, labels = make(torch.float64, bias=True, softcap=3.0)
    part = Head(
        weight=head.weight.detach()[first : first + own_rows].requires_grad_(),
        bias=head.bias.detach()[first : first + own_rows].requires_grad_(),
        softcap=3.0,
        first_id=first,
    )
    worst = []
    for k in (K, V):
        settings = {"temperature": 0.7, "chunk_bytes": 5 * M * 8}
        full = head_log_probs(hidden, head, labels, top_k=k, **settings)
        found = head_log_probs(hidden, part, labels, top_k=k, group=dist.group.WORLD, **settings)
        given = head_log_probs(hidden, part, labels, topk_ids=full.topk_ids, group=dist.group.WORLD, **settings)
        expected = gradients([full.topk_log_probs], [hidden, head.weight, head.bias])
        actual = gradients([given.topk_log_probs], [hidden, part.weight, part.bias])
        dist.all_reduce(actual[0])
        pairs = [
            (found.topk_ids.double(), full.topk_ids.double()),
            (found.topk_log_probs, full.topk_log_probs),
            (given.topk_log_probs, full.topk_log_probs),
            (actual[0], expected[0]),
            (actual[1], expected[1][first : first + own_rows]),
            (actual[2], expected[2][first : first + own_rows]),
        ]
        worst += [(ours - theirs).abs().max().item() if ours.numel() else 0.0 for ours, theirs in pairs]
    return worst


@pytest.mark.parametrize("size", [1, 2, 3])
def test_divided_vocabulary_equals_full_vocabulary(size):
    for worst in run_ranks(_divided, size, size):
        assert max(worst) < 1e-12
