"""Seeded sampling, without an engine."""

import subprocess
import sys
import types

import pytest
import torch
from tidemill_sglang_cpu.sampling import gumbel_argmax, keep_top, murmur_hash32


def reference_murmur(seed: int, position: int, column: int) -> int:
    """MurmurHash3 x86_32 of the 16 bytes (seed low, seed high, position, column), in Python integers."""
    word = 0xFFFFFFFF
    state = 0
    for block in (seed & word, (seed >> 32) & word, position & word, column & word):
        block = block * 0xCC9E2D51 & word
        block = (block << 15 | block >> 17) & word
        state ^= block * 0x1B873593 & word
        state = (state << 13 | state >> 19) & word
        state = state * 5 + 0xE6546B64 & word
    state ^= 16
    state = (state ^ state >> 16) * 0x85EBCA6B & word
    state = (state ^ state >> 13) * 0xC2B2AE35 & word
    return state ^ state >> 16


def test_hash_is_murmur3():
    seeds = torch.tensor([0, 42, 2**31 + 7, 2**62 + 12345, 2**63 - 1])
    positions = torch.tensor([0, 1, 77, 4095, 2**31 - 1])
    columns = torch.tensor([0, 1, 63, 151935])
    got = murmur_hash32(seeds, positions, columns)
    expected = [
        [reference_murmur(s, p, c) for c in columns.tolist()]
        for s, p in zip(seeds.tolist(), positions.tolist(), strict=True)
    ]
    assert got.tolist() == expected


def test_draws_follow_the_probabilities():
    probs = torch.tensor([0.5, 0.3, 0.15, 0.05])
    n = 20000
    drawn = gumbel_argmax(probs.expand(n, 4), torch.arange(n) * 7919, torch.arange(n) % 13)
    frequency = torch.bincount(drawn, minlength=4) / n
    torch.testing.assert_close(frequency, probs, atol=0.015, rtol=0)


def test_draw_depends_on_own_seed_and_position_only():
    g = torch.Generator().manual_seed(0)
    probs = torch.rand(50, 96, generator=g)
    seeds, positions = torch.arange(50) + 3, torch.arange(50) * 2
    batch_draws = gumbel_argmax(probs, seeds, positions)
    order = torch.randperm(50, generator=g)[:17]
    assert torch.equal(gumbel_argmax(probs[order], seeds[order], positions[order]), batch_draws[order])
    assert not torch.equal(gumbel_argmax(probs, seeds + 1, positions), batch_draws)
    assert not torch.equal(gumbel_argmax(probs, seeds, positions + 1), batch_draws)


@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p", "expected"),
    [
        (2, 1.0, None, {1, 3}),
        (4, 0.5, None, {1, 3}),
        (4, 1.0, 0.4, {1, 3}),
        (1 << 30, 1.0, None, {0, 1, 2, 3}),
    ],
)
def test_excluded_tokens_are_never_drawn(top_k, top_p, min_p, expected):
    probs = torch.tensor([[0.15, 0.4, 0.1, 0.35]])
    info = types.SimpleNamespace(
        top_ks=torch.tensor([top_k], dtype=torch.int32),
        top_ps=torch.tensor([top_p]),
        min_ps=torch.tensor([min_p or 0.0]),
        need_min_p_sampling=min_p is not None,
    )
    kept, ids = keep_top(probs, info)
    n = 4000
    drawn = ids[0][gumbel_argmax(kept.expand(n, 4), torch.arange(n), torch.zeros(n, dtype=torch.int64))]
    assert set(drawn.tolist()) == expected


def test_largest_hash_does_not_draw_a_token_with_probability_zero():
    seeds, positions = torch.tensor([2]), torch.tensor([1595])
    largest = murmur_hash32(seeds, positions, torch.arange(151936))[0].max()
    assert largest == 2**32 - 1  # of column 51182
    probs = torch.zeros(1, 151936)
    probs[0, 7] = 1.0
    assert gumbel_argmax(probs, seeds, positions).item() == 7
    probs[0, 7], probs[0, 51182] = 1 - 1e-12, 1e-12
    assert gumbel_argmax(probs, seeds, positions).item() == 7


WITHOUT_COMPILATION = """
import torch
from tidemill_sglang_cpu.patches import apply_patches

apply_patches()
from sglang.srt.sampling.penaltylib.repetition_penalty import apply_scaling_penalties

logits = torch.tensor([[2.0, -2.0, 0.0], [3.0, -3.0, 1.0]])
with torch.compiler.set_stance("fail_on_recompile"):
    apply_scaling_penalties(logits, torch.tensor([[1.0, 1.0, 1.0], [1.5, 1.5, 0.5]]))
assert logits.tolist() == [[2.0, -2.0, 0.0], [2.0, -4.5, 2.0]], logits
"""


def test_repetition_penalty_is_applied_without_compilation():
    """In its own process, because the patches remain."""
    done = subprocess.run([sys.executable, "-c", WITHOUT_COMPILATION], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
