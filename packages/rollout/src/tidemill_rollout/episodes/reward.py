"""A reward function: it scores the text of a reply. Its arguments are those of verl's reward functions."""

import asyncio
import math
from collections.abc import Awaitable, Callable
from typing import Any

from tidemill_rollout.outcome import Outcome, to_outcome
from tidemill_rollout.problem import Problem
from tidemill_rollout.thread import call

RewardFn = Callable[[str, str, Any, Any], float | dict[str, Any] | Awaitable[float | dict[str, Any]]]
"""`f(data_source, solution_str, ground_truth, extra_info)` returns the score, or a dict with "score" and further
numbers, such as "acc". With `async` it runs in the event loop, else in a thread of its own."""


async def score(reward: RewardFn, problem: Problem, text: str, *, timeout_s: float = math.inf) -> Outcome:
    """Return the outcome for the text of a reply.

    Raises:
        TimeoutError: the reward function returned nothing within `timeout_s`.
    """
    limit = asyncio.timeout(None if math.isinf(timeout_s) else timeout_s)
    try:
        async with limit:
            result = await call(reward, problem.data_source, text, problem.ground_truth, problem.extra_info)
    except TimeoutError:
        if limit.expired():
            raise TimeoutError(f"the reward function returned nothing within {timeout_s:g} s") from None
        raise
    return to_outcome(result)
