"""A Triton kernel that samples a token of each row and returns its log-prob, in one pass over the logits."""

from typing import Any

import torch
import triton
import triton.language as tl

_PART = 1024
"""Columns of a quarter of a block; a random number of Philox serves four columns."""


def sample(
    logits: torch.Tensor, temperatures: torch.Tensor, *, seed: int, step: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sample a token of each row from softmax(logits / temperature).

    The token with the largest sum of logit / temperature and independent Gumbel noise has that distribution (Gumbel-max
    trick; Maddison et al., "A* Sampling", 2014). The noise is a function of seed, step, row and token.

    Args:
        logits: [B, V], floating-point, rows contiguous. -inf excludes a token.
        temperatures: [B, 1] or [B] float32, positive.
        seed: int64, seed of the noise.
        step: int32, another one for each call with this seed.

    Returns:
        Tokens [B] int32, and their log-probs [B] float32; NaN in a row of logits makes its log-prob NaN.
    """
    num_rows, num_tokens = logits.shape
    assert logits.stride(1) == 1, "rows of logits must be contiguous"
    tokens = torch.empty(num_rows, dtype=torch.int32, device=logits.device)
    log_probs = torch.empty(num_rows, dtype=torch.float32, device=logits.device)
    if num_rows:
        launch: Any = _sample[(num_rows,)]
        launch(
            *(logits, temperatures, tokens, log_probs, logits.stride(0), num_tokens, seed, step),
            PART=_PART,
            num_warps=8,
        )
    return tokens, log_probs


@triton.jit
def _sample(logits, temperatures, tokens, log_probs, stride, num_tokens, seed, step, PART: tl.constexpr):  # noqa: N803
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, PART)
    zeros = tl.zeros((PART,), tl.int32)
    rows, steps = zeros + tl.program_id(0), zeros + step
    temperature = tl.load(temperatures + row)
    # Of each lane: largest sum so far, its logit and token; largest logit, and the sum of exponentials relative to it.
    best = tl.full((PART,), float("-inf"), tl.float32)
    chosen = tl.full((PART,), 0.0, tl.float32)
    token = zeros
    largest = tl.full((PART,), -1e30, tl.float32)  # finite: -inf - -inf is NaN
    total = tl.zeros((PART,), tl.float32)
    for start in range(0, num_tokens, 4 * PART):
        noise = tl.philox(seed, start + lane, rows, steps, zeros)
        for part in tl.static_range(4):
            column = start + part * PART + lane
            logit = tl.load(logits + row * stride + column, mask=column < num_tokens, other=float("-inf"))
            logit = logit.to(tl.float32) / temperature
            higher = tl.maximum(largest, logit)
            total = total * tl.exp(largest - higher) + tl.exp(logit - higher)
            largest = higher
            # -log(1 - u) is exponentially distributed; its smallest values, which win, need the series.
            uniform = tl.maximum(tl.uint_to_uniform_float(noise[part]), 2.0**-32)
            waiting = tl.where(uniform < 1e-3, uniform * (1.0 + 0.5 * uniform), -tl.log(1.0 - uniform))
            score = logit - tl.log(waiting)
            wins = score > best
            best = tl.where(wins, score, best)
            chosen = tl.where(wins, logit, chosen)
            token = tl.where(wins, column, token)
    peak = tl.max(largest, 0)
    log_sum = peak + tl.log(tl.sum(total * tl.exp(largest - peak), 0))
    winner = tl.argmax(best, 0)
    tl.store(tokens + row, tl.sum(tl.where(lane == winner, token, 0), 0))
    tl.store(log_probs + row, tl.sum(tl.where(lane == winner, chosen, 0.0), 0) - log_sum)
