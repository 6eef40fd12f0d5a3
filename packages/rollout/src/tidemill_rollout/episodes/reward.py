"""A reward function: it scores the text of a reply. It is called as verl calls its reward functions."""

import asyncio
import math
from collections.abc import Awaitable
from typing import Any, Protocol

from tidemill_rollout.outcome import Outcome, to_outcome
from tidemill_rollout.problem import Problem
from tidemill_rollout.thread import call

Score = float | dict[str, Any]


class RewardFn(Protocol):
    """It returns the score, or a dict with "score" and further numbers, such as "acc".

    All arguments are passed by keyword. With `async` it runs in the event loop, else in a thread of its own.
    """

    def __call__(
        self, *, data_source: str, solution_str: str, ground_truth: Any, extra_info: Any
    ) -> Score | Awaitable[Score]: ...


async def score(reward: RewardFn, problem: Problem, text: str, *, timeout_s: float = math.inf) -> Outcome:
    """Return the outcome for the text of a reply.

    Raises:
        TimeoutError: the reward function returned nothing within `timeout_s`.
    """
    limit = asyncio.timeout(None if math.isinf(timeout_s) else timeout_s)
    try:
        async with limit:
            result = await call(
                reward,
                data_source=problem.data_source,
                solution_str=text,
                ground_truth=problem.ground_truth,
                extra_info=problem.extra_info,
            )
    except TimeoutError:
        if limit.expired():
            raise TimeoutError(f"the reward function returned nothing within {timeout_s:g} s") from None
        raise
    return to_outcome(result)
