"""From the text of a reply to its message: reasoning, content and tool calls."""

import json
import re
from collections.abc import Callable
from typing import Any

from tidemill_rollout.messages import Message, parse_json

ToolCallParser = Callable[[str], tuple[str, list[tuple[str, str]]]]
"""Text -> (remaining text, [(name, arguments as JSON text)])."""

_HERMES = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)
_SURROGATE = re.compile("[\ud800-\udfff]")  # JSON can escape half of a pair, which clients cannot send back in UTF-8
_HERMES_PROMPT = re.compile(r'<tool_call>.*\\?"arguments\\?"', re.DOTALL)


def parse_hermes(text: str) -> tuple[str, list[tuple[str, str]]]:
    """Parse `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, the format of Qwen2.5 and Qwen3.

    A block that is no such JSON remains in the text.
    """
    calls = []

    def take(match: re.Match[str]) -> str:
        call = _call(match[1], "arguments")
        if call is None:
            return match[0]
        calls.append(call)
        return ""

    rest = _HERMES.sub(take, text)
    return (rest.strip() if calls else text), calls


def parse_llama3(text: str) -> tuple[str, list[tuple[str, str]]]:
    """Parse a reply that is one `{"name": ..., "parameters": {...}}`, the format of Llama 3.

    JSON without parameters is an answer and remains in the text. So do several calls, because the template rejects
    them.
    """
    call = _call(text.strip().removeprefix("<|python_tag|>"), "parameters", "arguments", may_lack_arguments=False)
    return (text, []) if call is None else ("", [call])


def _call(text: str, *keys: str, may_lack_arguments: bool = True) -> tuple[str, str] | None:
    value = parse_json(text)
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    if not may_lack_arguments and not any(key in value for key in keys):
        return None
    arguments = next((value[key] for key in keys if key in value), {})
    name, text = value["name"], json.dumps(arguments, ensure_ascii=False)
    return None if _SURROGATE.search(name + text) else (name, text)


def tool_call_parser(chat_template: str | None) -> ToolCallParser | None:
    """Return the parser for the format that a chat template asks the model to use; None if it is unknown."""
    if not chat_template:
        return None
    if _HERMES_PROMPT.search(chat_template):
        return parse_hermes
    return parse_llama3 if '"parameters": ' in chat_template else None


class ReplyParser:
    """Split replies of one model.

    Args:
        tool_calls: parser of the model's tool calls; None leaves them in the content.
        has_reasoning: the model's chat template knows `<think>` blocks; otherwise they remain in the content.
    """

    def __init__(self, tool_calls: ToolCallParser | None, *, has_reasoning: bool = True) -> None:
        self._tool_calls = tool_calls
        self._has_reasoning = has_reasoning

    @property
    def parses_tool_calls(self) -> bool:
        """Whether tool calls are recognized."""
        return self._tool_calls is not None

    def __call__(self, text: str, *, reasoning_is_open: bool, has_tools: bool, call_id: str) -> Message:
        """Return the assistant message of a reply.

        Args:
            text: text of the reply without special tokens.
            reasoning_is_open: the prompt ended with `<think>`, so the reply starts with reasoning.
            has_tools: the conversation has tools; without them, nothing is a tool call.
            call_id: prefix of the ids of tool calls, unique in the session.
        """
        message: Message = {"role": "assistant"}
        reasoning, content = _split_reasoning(text, reasoning_is_open) if self._has_reasoning else ("", text)
        if reasoning:
            message["reasoning_content"] = reasoning
        calls: list[tuple[str, str]] = []
        if has_tools and self._tool_calls is not None:
            content, calls = self._tool_calls(content)
        message["content"] = content
        if calls:
            message["tool_calls"] = [
                _tool_call(f"{call_id}-{number}", name, arguments) for number, (name, arguments) in enumerate(calls)
            ]
        return message


def _split_reasoning(text: str, is_open: bool) -> tuple[str, str]:
    head, opening, inside = text.partition("<think>")
    if opening and not head.strip():
        text = inside
    elif not is_open:
        return "", text
    reasoning, closing, content = text.partition("</think>")
    return reasoning.strip("\n"), content.lstrip("\n") if closing else ""


def _tool_call(call_id: str, name: str, arguments: str) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
