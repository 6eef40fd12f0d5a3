"""Replies: reasoning, tool calls of Qwen and Llama 3, and what models write instead."""

import json

import pytest
from template_cases import GLM, LLAMA3, LLAMA31, QWEN3, QWEN3_THINKING, QWEN25
from tidemill_rollout import ReplyParser, tool_call_parser
from tidemill_rollout.parser import parse_hermes, parse_llama3

CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Zürich 🙂"}}\n</tool_call>'


def split(text, family=QWEN3, *, is_open=False, has_tools=True):
    parser = ReplyParser(tool_call_parser(family.template), has_reasoning="</think>" in family.template)
    message = parser(text, reasoning_is_open=is_open, has_tools=has_tools, call_id="c")
    calls = [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls", ())]
    return message.get("reasoning_content"), message["content"], calls


@pytest.mark.parametrize(
    ("family", "parser"),
    [
        (QWEN25, parse_hermes),
        (QWEN3, parse_hermes),
        (QWEN3_THINKING, parse_hermes),
        (LLAMA31, parse_llama3),
        (LLAMA3, None),
        (GLM, None),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_format_of_tool_calls_is_that_of_the_template(family, parser):
    assert tool_call_parser(family.template) is parser


def test_reply_becomes_an_openai_message():
    parser = ReplyParser(parse_hermes)
    message = parser(f"<think>\nhm\n</think>\n\nI look.\n{CALL}", reasoning_is_open=False, has_tools=True, call_id="c")
    arguments = '{"city": "Zürich 🙂"}'
    assert message == {
        "role": "assistant",
        "reasoning_content": "hm",
        "content": "I look.",
        "tool_calls": [{"id": "c-0", "type": "function", "function": {"name": "weather", "arguments": arguments}}],
    }


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<think>\na\nb\n</think>\n\nx", ("a\nb", "x")),
        ("<think>\n\n</think>\n\nx", (None, "x")),
        ("\n<think>a</think>x <think>b</think>", ("a", "x <think>b</think>")),
        ("x <think>a</think>", (None, "x <think>a</think>")),
        ("x</think>y", (None, "x</think>y")),
        ("<think>\ncut off", ("cut off", "")),
        ("", (None, "")),
    ],
)
def test_reasoning_is_split_off(text, expected):
    assert split(text)[:2] == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a\n</think>\n\nx", ("a", "x")),
        ("cut off", ("cut off", "")),
        ("</think>\n\nx", (None, "x")),
        ("<think>\na\n</think>\n\nx", ("a", "x")),
    ],
)
def test_reply_to_a_prompt_that_opens_reasoning_starts_with_it(text, expected):
    assert split(text, QWEN3_THINKING, is_open=True)[:2] == expected


def test_reasoning_remains_in_the_content_where_the_template_has_none():
    text = "<think>a</think>x"
    assert split(text, QWEN25) == (None, text, [])


@pytest.mark.parametrize(
    ("text", "content", "names"),
    [
        (CALL, "", ["weather"]),
        (f"I look.\n{CALL}\n{CALL}", "I look.", ["weather", "weather"]),
        (f"{CALL} done", "done", ["weather"]),
        (CALL.removesuffix("</tool_call>"), "", ["weather"]),
        ("<tool_call>{}</tool_call>", "<tool_call>{}</tool_call>", []),
        ("<tool_call>\nnot JSON\n</tool_call> ", "<tool_call>\nnot JSON\n</tool_call> ", []),
        (f"<tool_call>[1]</tool_call>{CALL}", "<tool_call>[1]</tool_call>", ["weather"]),
        ("<tool_call>" + "[" * 100_000, "<tool_call>" + "[" * 100_000, []),
        ("<tool_call>x" + " " * 100_000 + "y", "<tool_call>x" + " " * 100_000 + "y", []),
    ],
    ids=["one", "two", "text after", "unclosed", "no name", "no JSON", "malformed and well-formed", "nested", "spaces"],
)
def test_tool_calls_of_qwen(text, content, names):
    _, got, calls = split(text)
    assert (got, [name for name, _ in calls]) == (content, names)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [('{"a": 1}', {"a": 1}), ('"text"', "text"), ("[1]", [1]), ("null", None)],
)
def test_arguments_are_json_text_of_what_the_model_wrote(arguments, expected):
    _, _, ((_, text),) = split(f'<tool_call>{{"name": "f", "arguments": {arguments}}}</tool_call>')
    assert json.loads(text) == expected


def test_call_with_half_of_a_surrogate_pair_remains_in_the_text():
    """Clients could not send it back: UTF-8 cannot represent it."""
    text = '<tool_call>{"name": "weather", "arguments": {"city": "\\ud83d"}}</tool_call>'
    assert parse_hermes(text) == (text, [])
    whole = text.replace("\\ud83d", "\\ud83d\\ude00")
    assert parse_hermes(whole) == ("", [("weather", '{"city": "😀"}')])


def test_missing_arguments_are_an_empty_object():
    assert split('<tool_call>{"name": "f"}</tool_call>')[2] == [("f", "{}")]


def test_tool_call_inside_reasoning_is_none():
    assert split(f"<think>{CALL}</think>x") == (CALL, "x", [])


@pytest.mark.parametrize("family", [QWEN3, LLAMA31], ids=lambda family: family.name)
def test_nothing_is_a_tool_call_without_tools(family):
    text = CALL if family is QWEN3 else '{"name": "f", "parameters": {}}'
    assert split(text, family, has_tools=False) == (None, text, [])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"name": "f", "parameters": {"x": 1}}', ("", [("f", '{"x": 1}')])),
        (' {"name": "f", "arguments": {"x": 1}}\n', ("", [("f", '{"x": 1}')])),
        ('<|python_tag|>{"name": "f", "parameters": {}}', ("", [("f", "{}")])),
        ('I call {"name": "f", "parameters": {}}', ('I call {"name": "f", "parameters": {}}', [])),
        ('{"name": "f"}; {"name": "g"}', ('{"name": "f"}; {"name": "g"}', [])),
        ('{"answer": 42}', ('{"answer": 42}', [])),
        ('{"name": "Ada", "age": 36}', ('{"name": "Ada", "age": 36}', [])),
        ("42", ("42", [])),
    ],
)
def test_tool_calls_of_llama3(text, expected):
    assert split(text, LLAMA31)[1:] == expected


@pytest.mark.parametrize(
    "text",
    [CALL, f"I look.\n{CALL}\n{CALL}", "no call", '<tool_call>\n{"name": "weather", "arguments": {}}\n</tool_call>'],
)
def test_qwen_calls_are_parsed_as_by_sglang(text):
    detector = pytest.importorskip("sglang.srt.function_call.qwen25_detector").Qwen25Detector()
    protocol = pytest.importorskip("sglang.srt.entrypoints.openai.protocol")
    tools = [protocol.Tool(type="function", function=protocol.Function(name="weather", parameters={}))]
    expected = detector.detect_and_parse(text, tools)
    _, content, calls = split(text)
    assert content == expected.normal_text
    assert calls == [(call.name, call.parameters) for call in expected.calls]
