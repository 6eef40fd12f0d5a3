"""Log-probabilities with a vocabulary divided among ranks against the full head."""

import pytest
import torch
import torch.distributed as dist
from tidemill_testing import run_ranks

M, H, V = 11, 8, 37


def _compare(size: int) -> list[float]:
    """Return the largest differences of log-probs, entropy and gradients, over dtypes and chunks."""
    from tidemill_engines.head.log_probs import Head, head_log_probs

    rows = -(-V // size)
    first = dist.get_rank() * rows
    num_tokens = max(0, min(rows, V - first))
    worst = []
    for chunk_tokens in (1, 4, 100):
        generator = torch.Generator().manual_seed(chunk_tokens)
        hidden = torch.randn(M, H, generator=generator, dtype=torch.float64).requires_grad_()
        weight = torch.randn(V, H, generator=generator, dtype=torch.float64).requires_grad_()
        labels = torch.randint(0, V, (M,), generator=generator)
        labels[:2] = torch.tensor([0, V - 1])
        expected = head_log_probs(hidden, Head(weight=weight), labels, temperature=0.7, entropy=True)[:2]
        _total(expected).backward()
        padded = torch.full((rows, H), 5.0, dtype=torch.float64)  # must not contribute
        padded[:num_tokens] = weight.detach()[first : first + num_tokens]
        padded.requires_grad_()
        own = hidden.detach().clone().requires_grad_()
        head = Head(weight=padded[:num_tokens], first_id=first)
        settings = {"temperature": 0.7, "chunk_bytes": chunk_tokens * rows * 8, "group": dist.group.WORLD}
        actual = head_log_probs(own, head, labels, entropy=True, **settings)[:2]
        alone, none = head_log_probs(own, head, labels, **settings)[:2]
        assert none is None
        _total(actual).backward()
        grad = own.grad.clone()
        dist.all_reduce(grad)
        assert not padded.grad[num_tokens:].any()
        pairs = [
            *zip(actual, expected, strict=True),
            (alone, expected[0]),
            (grad, hidden.grad),
            (padded.grad[:num_tokens], weight.grad[first : first + num_tokens]),
        ]
        worst += [(ours - theirs).abs().max().item() if ours.numel() else 0.0 for ours, theirs in pairs]
    return worst


def _total(outputs):
    return sum((output * torch.linspace(-1, 2, M, dtype=torch.float64)).sum() for output in outputs)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_divided_vocabulary_equals_full_vocabulary(size):
    for worst in run_ranks(_compare, size, size):
        assert max(worst) < 1e-12


def _only_padding() -> list[float]:
    """Three tokens on four ranks: one row each, the last rank has padding only."""
    from tidemill_engines.head.log_probs import Head, head_log_probs

    rank = dist.get_rank()
    weight = torch.eye(4)[rank : rank + 1].clone().requires_grad_()
    head = Head(weight=weight[: int(rank < 3)], first_id=rank)
    hidden = torch.zeros(2, 4, requires_grad=True)
    labels = torch.tensor([0, 2])
    log_probs, entropy, *_ = head_log_probs(hidden, head, labels, entropy=True, group=dist.group.WORLD)
    (log_probs.sum() + entropy.sum()).backward()
    return torch.cat([log_probs, entropy]).detach().tolist()


def test_rank_with_padding_only():
    expected = torch.full((4,), 3.0).log() * torch.tensor([-1, -1, 1, 1])
    for values in run_ranks(_only_padding, 4):
        torch.testing.assert_close(torch.tensor(values), expected)
