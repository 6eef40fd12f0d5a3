"""Messages: what is accepted, what is equal, and what a template receives."""

import asyncio

import pytest
from template_cases import user
from tidemill_rollout.messages import canonical, check_messages, for_template, identity

USER = {"role": "user", "content": "hello"}


def call(arguments, **fields):
    return {"id": "a", "type": "function", "function": {"name": "f", "arguments": arguments}, **fields}


def reply(*calls, **fields):
    return {"role": "assistant", "content": "", "tool_calls": list(calls), **fields}


@pytest.mark.parametrize(
    ("messages", "error"),
    [
        ([], "non-empty list, got \\[\\]"),
        ("hello", "non-empty list, got 'hello'"),
        (None, "non-empty list, got None"),
        (
            [USER, "hello"],
            r"messages\[1\]: expected an object with a role of system, .*, got 'hello'; convert .*model_dump",
        ),
        ([{"role": "function", "content": ""}], r"messages\[0\]: expected an object with a role"),
        ([{"from": "human", "value": "a"}], r"expected an object with a role .*; rename its keys and its role, as in "),
        (
            [{"role": "user", "value": "a"}],
            r"messages\[0\]: expected `content` in a message of the role user, got {'role",
        ),
        ([USER, reply(), {"role": "tool", "content": None}], r"messages\[2\]: expected `content` .* of the role tool"),
        ([{"role": "user", "content": 5}], r"messages\[0\]: only text content is supported, got 5"),
        (
            [{"role": "user", "content": [{"type": "image_url"}]}],
            "only text content is supported, got {'type': 'image_url'}",
        ),
        ([reply({"id": "a"}), USER], r"messages\[0\]: expected tool calls with a function name"),
        ([reply("f"), USER], "expected tool calls with a function name, got 'f'"),
        ([USER, {"role": "assistant", "content": "x"}], "last message must not be from the assistant"),
    ],
)
def test_malformed_messages_are_refused_with_their_number(messages, error):
    with pytest.raises(ValueError, match=error):
        check_messages(messages)


def test_empty_fields_are_removed_and_text_parts_joined():
    parts = [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]
    given = {"role": "user", "content": parts, "refusal": None, "annotations": [], "name": "ann"}
    assert check_messages([given]) == [{"role": "user", "content": "hello", "name": "ann"}]
    assert check_messages([{"role": "assistant"}, USER])[0] == {"role": "assistant", "content": ""}


def test_later_changes_of_the_caller_do_not_change_the_messages():
    given = [reply(call("{}")), {"role": "tool", "tool_call_id": "a", "content": "x"}]
    cleaned = check_messages(given)
    given[0]["tool_calls"][0]["function"]["arguments"] = "changed"
    assert cleaned[0]["tool_calls"][0]["function"]["arguments"] == "{}"


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (reply(call('{"a": 1, "b": 2}')), reply(call('{ "b":2,"a":1}'))),
        (reply(call('{"a": 1}')), reply(call({"a": 1}, index=0))),
        (reply(call("{}")), reply(call("{}") | {"id": "other"})),
        (reply(call("not JSON")), reply(call("not JSON"), reasoning_content="hm")),
    ],
    ids=["order of keys", "object", "id", "reasoning"],
)
def test_equal_messages(first, second):
    assert identity(first) == identity(second)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (reply(call('{"a": 1}')), reply(call('{"a": "1"}'))),
        (reply(call('{"a": 1}')), reply(call('{"a": 1}'), call('{"a": 1}'))),
        (reply(call("{}")), {"role": "assistant", "content": ""}),
        (reply(call("not JSON")), reply(call("not  JSON"))),
        ({"role": "tool", "tool_call_id": "a", "content": "x"}, {"role": "tool", "tool_call_id": "b", "content": "x"}),
        (USER, USER | {"role": "system"}),
        (USER, USER | {"content": "hello "}),
    ],
    ids=["type", "number of calls", "no calls", "text", "id of a result", "role", "whitespace"],
)
def test_different_messages(first, second):
    assert identity(first) != identity(second)


def test_template_receives_arguments_as_objects_or_unchanged_text():
    message = for_template(reply(call('{"a": 1}'), call("not JSON"), call("[1]")))
    assert [item["function"]["arguments"] for item in message["tool_calls"]] == [{"a": 1}, "not JSON", "[1]"]


def test_tools_that_are_not_json_are_refused():
    with pytest.raises(ValueError, match="must be JSON: Object of type set is not JSON serializable; got"):
        canonical([{"enum": {1, 2}}])


@pytest.mark.parametrize(
    "message",
    [
        {"role": "assistant", "content": "x", "tool_calls": 5},
        {"role": "tool", "content": "x", "tool_call_id": ["a"]},
    ],
)
def test_malformed_tool_call_is_a_value_error(scripted, message):
    with pytest.raises(ValueError, match=r"messages\[1\]: tool_call"):
        asyncio.run(scripted("x").session().generate([user("a"), message, user("b")]))
