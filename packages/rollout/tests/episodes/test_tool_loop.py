"""The episode tool_loop: schemas of Python functions, calls, errors that are returned to the model, limits."""

import asyncio
import json
import re
import threading
from typing import Any, Literal, Optional

import pytest
from tidemill_rollout import Policy, Problem, ReplyParser, SessionConfig
from tidemill_rollout.episodes import tool_loop
from tidemill_rollout.episodes.tool import Tool

PROBLEM = Problem(prompt="what is the answer", ground_truth="42")


def exact(data_source, solution_str, ground_truth, extra_info):
    return float(solution_str == ground_truth)


def call_text(name, arguments):
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call><|im_end|>"


def multiply(x: int, y: float = 1.0) -> float:
    """Multiply two numbers.

    Args:
        x: the first factor
        y: the second factor
    """
    return x * y


async def lookup(word: Literal["cat", "dog"], tags: Optional[list[str]] = None) -> dict[str, Any]:  # noqa: UP045
    """Look a word up.

    Args:
        word: the word
        tags: tags to filter by
    """
    await asyncio.sleep(0)
    return {"word": word, "tags": tags}


def leave(code: int) -> str:
    """Call exit.

    Args:
        code: exit code
    """
    raise SystemExit(code)


@pytest.fixture
def chat(scripted_tools):
    """`chat(*replies, tools=..., **options)`: result of a tool loop, and the messages of its last turn."""

    def play(*texts, tools=(multiply, lookup, leave), timeout_s=float("inf"), config=None, **options):
        policy: Policy = scripted_tools(*texts, config=config)
        sessions = []

        async def episode(problem, session):
            sessions.append(session)
            return await tool_loop(tools, exact, **options)(problem, session)

        result = asyncio.run(policy.run(episode, PROBLEM, timeout_s=timeout_s))
        return result, sessions[0].recorder.turns[-1].messages

    return play


def test_type_hints_and_docstring_become_an_openai_schema():
    assert Tool(lookup).schema == {
        "type": "function",
        "function": {
            "name": "lookup",
            "description": "Look a word up.",
            "parameters": {
                "type": "object",
                "properties": {
                    "word": {"type": "string", "enum": ["cat", "dog"], "description": "the word"},
                    "tags": {
                        "type": "array",
                        "items": {"type": "string"},
                        "nullable": True,
                        "description": "tags to filter by",
                    },
                },
                "required": ["word"],
            },
        },
    }


def test_calls_run_in_order_and_the_answer_is_scored(chat):
    result, messages = chat(
        call_text("multiply", {"x": 6, "y": 7}), call_text("lookup", {"word": "cat"}), "42<|im_end|>"
    )
    assert [m["content"] for m in messages if m["role"] == "tool"] == ["42", '{"word": "cat", "tags": null}']
    calls = [m["tool_calls"][0]["id"] for m in messages if "tool_calls" in m]
    assert calls == [m["tool_call_id"] for m in messages if m["role"] == "tool"]
    assert (result.outcome.status, result.outcome.reward) == ("ok", 1.0)
    assert result.outcome.metrics == {"num_tool_calls": 2.0, "num_tool_errors": 0.0}
    assert len(result.trajectories) == 1
    assert result.metrics["num_trained_tokens"] == result.metrics["num_sampled_tokens"]


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("divide", {}, "there is no tool 'divide'; the tools are: multiply, lookup, leave"),
        ("multiply", {"y": 2}, 'multiply expects a JSON object that fits .*, got {"y": 2}'),
        ("multiply", {"x": "6"}, '.*, got x="6"'),
        ("multiply", {"x": True}, ".*, got x=true"),
        ("multiply", {"x": 1.5}, ".*, got x=1.5"),
        ("multiply", {"x": 6, "z": 1}, ".*, got z=1"),
        ("multiply", "6", '.*, got "6"'),
        ("multiply", [6], r".*, got \[6\]"),
        ("lookup", {"word": "cow"}, '.*, got word="cow"'),
        ("lookup", {"word": "cat", "tags": [1]}, r".*, got tags=\[1\]"),
        ("leave", {"code": 3}, "leave failed: SystemExit: 3"),
    ],
)
def test_call_that_fails_is_returned_to_the_model_as_text_and_counted(chat, name, arguments, message):
    result, messages = chat(call_text(name, arguments), "42<|im_end|>")
    assert messages[-2]["role"] == "tool"
    assert re.fullmatch(f"Error: {message}", messages[-2]["content"])
    assert result.outcome.reward == 1.0
    assert result.outcome.metrics == {"num_tool_calls": 1.0, "num_tool_errors": 1.0}


def test_arguments_that_are_not_json_are_refused():
    with pytest.raises(RuntimeError, match=r"multiply expects a JSON object .*, got invalid JSON: Expecting"):
        asyncio.run(Tool(multiply)('{"x": 6', 1.0))


def test_call_whose_text_is_not_json_is_the_answer(chat):
    result, messages = chat('<tool_call>\n{"name": "multiply", "arguments": {"x": 6\n</tool_call><|im_end|>')
    assert messages[-1]["content"].startswith('<tool_call>\n{"name": "multiply"')
    assert (result.outcome.status, result.outcome.reward) == ("ok", 0.0)
    assert result.outcome.metrics == {"num_tool_calls": 0.0, "num_tool_errors": 0.0}


@pytest.mark.parametrize("is_async", [True, False])
def test_call_that_never_returns_ends_at_its_time_limit(chat, is_async):
    is_stopped = threading.Event()

    def waits():
        """Wait."""
        is_stopped.wait()

    async def waits_async():
        """Wait."""
        await asyncio.Event().wait()

    tool = waits_async if is_async else waits
    result, messages = chat(call_text(tool.__name__, {}), "42<|im_end|>", tools=[tool], tool_timeout_s=0.05)
    is_stopped.set()
    assert messages[-2]["content"] == f"Error: {tool.__name__} failed: no result within 0.05 s"
    assert result.outcome.metrics["num_tool_errors"] == 1.0


def test_timeout_error_that_a_tool_raises_is_not_the_time_limit(chat):
    def fetch():
        """Fetch."""
        raise TimeoutError("server")

    _, messages = chat(call_text("fetch", {}), "42<|im_end|>", tools=[fetch])
    assert messages[-2]["content"] == "Error: fetch failed: TimeoutError: server"


def test_conversation_without_an_answer_is_truncated_with_its_counts(chat):
    result, _ = chat(call_text("multiply", {"x": 1}), max_turns=3)
    assert (result.outcome.status, result.outcome.reason) == ("truncated", "turns: no answer within 3 turns")
    assert result.outcome.metrics == {"num_tool_calls": 3.0, "num_tool_errors": 0.0}


def test_context_limit_truncates_with_the_counts_so_far(chat):
    result, _ = chat(call_text("multiply", {"x": 1}), config=SessionConfig(context_length=900))
    assert result.outcome.status == "truncated"
    assert result.outcome.reason.startswith("length: ")
    assert result.outcome.metrics["num_tool_calls"] >= 1.0


def test_functions_that_cannot_be_tools_are_refused_with_their_name():
    def no_hint(x):
        """Do.

        Args:
            x: a value
        """

    def unsupported(x: set[int]):
        """Do.

        Args:
            x: a value
        """

    def own_class(x: Problem):
        """Do.

        Args:
            x: a value
        """

    def nested(x: list[Problem] | None):
        """Do.

        Args:
            x: a value
        """

    def undescribed(x: int):
        """Do."""

    def starred(*x: int):
        """Do.

        Args:
            x: a value
        """

    for function in (no_hint, unsupported, own_class, nested, undescribed, starred):
        with pytest.raises(TypeError, match=f"cannot make a tool of the function {function.__name__}: "):
            tool_loop([function], exact)


def test_two_tools_with_one_name_are_refused():
    with pytest.raises(ValueError, match=r"different names, got \['multiply', 'multiply'\]"):
        tool_loop([multiply, multiply], exact)


def test_policy_that_parses_no_tool_calls_is_refused(scripted_tools):
    policy = scripted_tools("42<|im_end|>")
    policy.parser = ReplyParser(None)
    outcome = asyncio.run(policy.run(tool_loop([multiply], exact), PROBLEM)).outcome
    assert outcome.status == "environment_error"
    assert "tool_loop requires a parser of the model's tool calls" in outcome.reason
    assert policy.engine.requests == []
