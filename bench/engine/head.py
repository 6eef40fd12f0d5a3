"""Log-probabilities from hidden states: fused over chunks of tokens, and from all logits at once."""

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from tidemill_engines.head.log_probs import Head, head_log_probs

REPEATS = 3


def compare_heads(num_tokens: int, hidden_size: int, vocab_size: int, device: torch.device) -> dict[str, Any]:
    """Measure time and, on a GPU, peak extra memory of a forward and backward pass of each."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    generator = torch.Generator(device).manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=dtype)

    hidden = random(num_tokens, hidden_size).requires_grad_()
    weight = random(vocab_size, hidden_size).mul_(0.02).requires_grad_()
    labels = torch.randint(vocab_size, (num_tokens,), generator=generator, device=device)

    def fused() -> torch.Tensor:
        return head_log_probs(hidden, Head(weight=weight), labels)[0]

    def plain() -> torch.Tensor:
        return -F.cross_entropy(F.linear(hidden, weight).float(), labels, reduction="none")

    fused_s, fused_bytes, ours = _run(fused, [hidden, weight], device)
    plain_s, plain_bytes, theirs = _run(plain, [hidden, weight], device)
    return {
        "num_tokens": num_tokens,
        "fused_s": fused_s,
        "plain_s": plain_s,
        "fused_bytes": fused_bytes,
        "plain_bytes": plain_bytes,
        "largest_difference": (ours - theirs).abs().max().item(),
    }


def _run(
    log_probs: Callable[[], torch.Tensor], inputs: list[torch.Tensor], device: torch.device
) -> tuple[float, int | None, torch.Tensor]:
    is_cuda = device.type == "cuda"
    seconds = []
    peak, out = None, torch.empty(0)
    for _ in range(1 + REPEATS):
        if is_cuda:
            torch.cuda.synchronize(device)
            torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device) if is_cuda else 0
        started = time.perf_counter()
        value = log_probs()
        torch.autograd.grad(value.sum(), inputs)
        if is_cuda:
            torch.cuda.synchronize(device)
            peak = torch.cuda.max_memory_allocated(device) - before
        seconds.append(time.perf_counter() - started)
        out = value.detach()
    return statistics.median(seconds[1:]), peak, out
