"""A conversation in which the model calls Python functions until it answers without a call."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any

from tidemill_rollout.episodes.reward import RewardFn, score
from tidemill_rollout.episodes.tool import Tool, ToolError
from tidemill_rollout.errors import LimitError
from tidemill_rollout.outcome import Outcome, truncated
from tidemill_rollout.problem import Problem
from tidemill_rollout.session import Session


def tool_loop(
    tools: Sequence[Callable[..., Any]], reward: RewardFn, *, max_turns: int = 10, tool_timeout_s: float = 60.0
) -> Callable[[Problem, Session], Awaitable[Outcome]]:
    """Return the episode that lets the model call functions, and scores the first reply without a call.

    Unknown functions, arguments that do not fit, exceptions and timeouts of a function are returned to the model as
    text. The metrics are `num_tool_calls` and `num_tool_errors`. A policy that does not parse the tool calls of its
    model is refused.

    Args:
        tools: functions with type hints and a Google-style docstring (see `Tool`). Without `async`, each call has a
            thread of its own; one that never returns keeps it until the process ends.
        reward: reward function, which receives the last reply without special tokens.
        max_turns: maximum number of replies; without an answer by then, the outcome is "truncated".
        tool_timeout_s: time limit of one call.

    Raises:
        TypeError: a function cannot become a tool.
        ValueError: two functions have the same name.
    """
    by_name = {tool.name: tool for tool in map(Tool, tools)}
    if len(by_name) < len(tools):
        raise ValueError(f"tools must have different names, got {[tool.__name__ for tool in tools]}")
    schemas = [tool.schema for tool in by_name.values()]

    async def answer(call: dict[str, Any]) -> str:
        name = call["function"]["name"]
        if name not in by_name:
            raise ToolError(f"there is no tool {name!r}; the tools are: {', '.join(by_name)}")
        return await by_name[name](call["function"]["arguments"], tool_timeout_s)

    async def episode(problem: Problem, session: Session) -> Outcome:
        if not session.parses_tool_calls:
            raise ValueError(
                "tool_loop requires a parser of the model's tool calls, and the chat template has an unknown format; "
                "set policy.parser = ReplyParser(...) with one"
            )
        messages = problem.messages
        num_calls = num_errors = 0
        outcome = truncated("turns", f"no answer within {max_turns} turns")
        try:
            for _ in range(max_turns):
                reply = await session.generate(messages, tools=schemas)
                if not reply.tool_calls:
                    outcome = await score(reward, problem, reply.text)
                    break
                messages.append(reply.message)
                for call in reply.tool_calls:
                    num_calls += 1
                    try:
                        text = await answer(call)
                    except ToolError as error:
                        num_errors += 1
                        text = f"Error: {error}"
                    messages.append({"role": "tool", "tool_call_id": call["id"], "content": text})
        except LimitError as error:
            outcome = truncated(error.limit, str(error))
        counts = {"num_tool_calls": float(num_calls), "num_tool_errors": float(num_errors)}
        return replace(outcome, metrics={**outcome.metrics, **counts})

    return episode
