"""Chat messages in OpenAI's format: cleaning, comparison, and the form that chat templates expect."""

import json
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

from tidemill_rollout.errors import short

Message = dict[str, Any]
"""{"role": ..., "content": ..., ...} as in OpenAI's chat completions; a reply can also have `reasoning_content`."""

_ENCODER = json.JSONEncoder(sort_keys=True, ensure_ascii=False)
_ROLES = ("system", "developer", "user", "assistant", "tool")


def check_messages(messages: Any) -> list[Message]:
    """Return copies of `messages` with text parts joined and empty fields removed.

    Raises:
        ValueError: `messages` is no list of messages with a known role and text content, which only replies of the
            assistant may lack; it is empty; or it ends with an assistant message.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise ValueError(f"messages must be a non-empty list, got {short(messages)}")
    cleaned = [clean_message(message, number) for number, message in enumerate(messages)]
    if cleaned[-1]["role"] == "assistant":
        raise ValueError(
            "the last message must not be from the assistant: a reply cannot be continued; end with a user or tool "
            "message"
        )
    return cleaned


def clean_message(message: Any, number: int = 0) -> Message:
    """Return a copy of a message with text parts joined and empty fields removed; see `check_messages`."""
    if not isinstance(message, Mapping) or message.get("role") not in _ROLES:
        remedy = "convert messages of a client library to dicts, such as with model_dump()"
        if isinstance(message, Mapping):
            remedy = 'rename its keys and its role, as in {"role": "user", "content": "..."}'
        raise ValueError(
            f"messages[{number}]: expected an object with a role of {', '.join(_ROLES)}, got {short(message)}; {remedy}"
        )
    if message["role"] != "assistant" and message.get("content") is None:
        raise ValueError(
            f"messages[{number}]: expected `content` in a message of the role {message['role']}, got "
            f"{short(dict(message))}"
        )
    cleaned = {name: value for name, value in message.items() if value is not None and value != []}
    cleaned["content"] = _text(message.get("content"), number)
    if not isinstance(cleaned.get("tool_call_id", ""), str):
        raise ValueError(f"messages[{number}]: tool_call_id must be a string, got {short(cleaned['tool_call_id'])}")
    if "tool_calls" in cleaned:
        if not isinstance(cleaned["tool_calls"], Sequence):
            raise ValueError(f"messages[{number}]: tool_calls must be a list, got {short(cleaned['tool_calls'])}")
        cleaned["tool_calls"] = [_clean_call(call, number) for call in cleaned["tool_calls"]]
    return cleaned


def _clean_call(call: Any, number: int) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise ValueError(f"messages[{number}]: expected tool calls with a function name, got {short(call)}")
    return {**call, "function": dict(function)}


def _text(content: Any, number: int) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, Sequence) else [content]
    for part in parts:
        if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise ValueError(f"messages[{number}]: only text content is supported, got {short(part)}")
    return "".join(part["text"] for part in parts)


def identity(message: Message) -> Hashable:
    """Return what makes two messages the same: role, text, tool calls with parsed arguments, and the tool call's id.

    Reasoning is left out, because most clients do not send it back; the recorded tokens contain it.
    """
    calls = message.get("tool_calls")
    if calls is None:
        name = None if message["role"] == "assistant" else message.get("name")  # clients name replies themselves
        return message["role"], message["content"], message.get("tool_call_id"), name
    names = [(call["function"]["name"], arguments(call["function"].get("arguments"))) for call in calls]
    return message["role"], message["content"], canonical(names)


def canonical(value: Any) -> str:
    """Return equal texts for equal JSON values, whatever the order of their keys.

    Raises:
        ValueError: the value is not JSON.
    """
    try:
        return _ENCODER.encode(value)
    except TypeError as error:
        raise ValueError(f"tools and tool calls must be JSON: {error}; got {short(value)}") from error


def arguments(value: Any) -> Any:
    """Return the arguments of a tool call as an object; text that is no JSON object is returned unchanged."""
    if isinstance(value, str):
        parsed = parse_json(value)
        return parsed if isinstance(parsed, dict) else value
    return value


def parse_json(text: str) -> Any:
    """Return the value of a JSON text that a model wrote; None if it is not JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def for_template(message: Message, *, has_developer: bool = False) -> Message:
    """Return a message as chat templates expect it: arguments of tool calls as objects, and a role that they know.

    Args:
        message: the message.
        has_developer: the template has a role "developer". Others silently drop such a message, so it is passed as a
            system message.
    """
    if message["role"] == "developer" and not has_developer:
        message = message | {"role": "system"}
    if "tool_calls" not in message:
        return message
    calls = [
        call | {"function": call["function"] | {"arguments": arguments(call["function"].get("arguments"))}}
        for call in message["tool_calls"]
    ]
    return message | {"tool_calls": calls}
