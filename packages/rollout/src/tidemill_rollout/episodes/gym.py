"""Environments with `reset` and `step`, as gymnasium defines them, whose observations and actions are texts."""

import sys
from collections.abc import Callable
from contextlib import nullcontext, suppress
from typing import Any, Protocol

from tidemill_rollout.blocking import BlockingSession
from tidemill_rollout.episode import EpisodeFn
from tidemill_rollout.errors import LimitError, short
from tidemill_rollout.messages import Message
from tidemill_rollout.outcome import Outcome, truncated
from tidemill_rollout.problem import Problem

Observation = str | list[Message]
"""A text, which becomes a user message, or messages."""


class TextEnv(Protocol):
    """gymnasium's interface. An environment serves one episode."""

    def reset(self, *, seed: int) -> tuple[Observation, dict[str, Any]]:
        """Return the first observation, which starts the conversation, and further data, which is ignored."""
        ...

    def step(self, action: str) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        """Return the next observation, the reward of this step, terminated, truncated, and further data."""
        ...

    def close(self) -> None:
        """Free what the environment holds."""
        ...


def gym_episode(make_env: Callable[[Problem], TextEnv], *, max_turns: int = 100) -> EpisodeFn:
    """Return the episode in which the model's replies are the actions; its reward is the sum of the steps' rewards.

    All calls of one environment are made in one thread, which the episode has for itself. At the time limit, the
    environment is closed when its running call returns. The metric is `num_steps`.

    Args:
        make_env: returns the environment of a problem. `reset` receives the problem's ordinal as the seed, so all
            samples of a problem start alike.
        max_turns: maximum number of steps; then the outcome is "truncated" with the rewards so far.
    """

    def episode(problem: Problem, session: BlockingSession) -> Outcome:
        env = make_env(problem)
        total, num_steps = 0.0, 0
        limit, message = "turns", f"the environment has not terminated within {max_turns} steps"
        try:
            start = env.reset(seed=problem.ordinal)
            if not isinstance(start, tuple) or len(start) != 2:
                raise TypeError(f"reset() must return (observation, info), got {short(start)}")
            messages = _messages(start[0])
            while num_steps < max_turns:
                reply = session.generate(messages)
                observation, reward, is_terminated, is_truncated, _ = env.step(reply.text)
                total, num_steps = total + float(reward), num_steps + 1
                if is_terminated:
                    return Outcome(reward=total, metrics={"num_steps": float(num_steps)})
                if is_truncated:
                    message = "the environment has truncated the episode"
                    break
                messages += [reply.message, *_messages(observation)]
        except LimitError as error:
            limit, message = error.limit, str(error)
        finally:
            # An error of `close` must not hide that of a step.
            with suppress(Exception) if sys.exc_info()[0] is not None else nullcontext():
                env.close()
        return truncated(limit, message, reward=total, metrics={"num_steps": float(num_steps)})

    return episode


def _messages(observation: Observation) -> list[Message]:
    return [{"role": "user", "content": observation}] if isinstance(observation, str) else list(observation)
