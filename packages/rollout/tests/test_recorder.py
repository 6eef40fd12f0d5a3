"""The recorder: requests that cannot continue a sequence, their reasons, branches, and prompts of tokens."""

import asyncio
import copy
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from template_cases import CHATML, PLAIN_CHATML, QWEN3, QWEN25, SYSTEM, TOOLS, Chat, tool, user

OTHER_TOOLS = [{"type": "function", "function": {"name": "search", "parameters": {}}}]


@pytest.fixture
def chat(bpe) -> Chat:
    """A conversation of two turns: weather? -> tool call -> rain -> wet."""
    chat = Chat(QWEN25, bpe, tools=TOOLS)
    chat.ask(SYSTEM, user("weather?"), reply=QWEN25.reply("I look.", calls=[{"city": "Ulm", "day": 1}]))
    chat.ask(tool("rain"), reply=QWEN25.reply("wet"))
    return chat


def assert_all_sampled_tokens_are_trained(chat: Chat, **forks: int) -> None:
    assert chat.forks == forks
    assert sorted(chat.trained()) == sorted(chat.sampled)
    assert len(chat.rows()) == 1 + sum(forks.values())


def example(chat: Chat, reason: str) -> tuple[str, str]:
    found = chat.session.recorder.fork_examples[reason]
    return found.expected, found.received


def test_edited_reply_starts_a_sequence_and_is_shown(chat):
    messages = copy.deepcopy(chat.messages)
    messages[-1]["content"] = "dry"
    chat.send([*messages, user("sure?")], reply="yes<|im_end|>")
    first, second = chat.rows()
    assert_all_sampled_tokens_are_trained(chat, edited=1)
    assert [len(row.turns) for row in (first, second)] == [2, 2], "the first turn is shared"
    assert list(second.response_mask[: second.turns[0][1]]) == [0] * second.turns[0][1]
    assert example(chat, "edited") == (
        '{"role": "assistant", "content": "wet"}',
        '{"role": "assistant", "content": "dry"}\n{"role": "user", "content": "sure?"}',
    )


def test_edited_question_starts_a_sequence_from_the_first_prompt(chat):
    messages = [chat.messages[0], user("weather in Ulm?"), *chat.messages[2:], user("sure?")]
    chat.send(messages, reply="yes<|im_end|>")
    assert_all_sampled_tokens_are_trained(chat, unrelated=1)
    expected, received = example(chat, "unrelated")
    assert expected.startswith('{"role": "user", "content": "weather?"}\n')
    assert received.startswith('{"role": "user", "content": "weather in Ulm?"}\n')
    assert chat.rows()[1].num_prompt_tokens == len(chat.engine.prompts[-1])


def test_edited_arguments_start_a_sequence(chat):
    messages = copy.deepcopy(chat.messages)
    messages[2]["tool_calls"][0]["function"]["arguments"] = '{"city": "Bonn", "day": 1}'
    chat.send([*messages, user("sure?")], reply="yes<|im_end|>")
    assert_all_sampled_tokens_are_trained(chat, edited=1)
    expected, received = example(chat, "edited")
    assert expected.startswith("...")
    assert "Ulm" in expected[:70]
    assert "Bonn" in received[:70]


@pytest.mark.parametrize("arguments", ['{"day":1,\n"city":"\\u0055lm"}', {"day": 1, "city": "Ulm"}])
def test_reformatted_arguments_are_no_edit(chat, arguments):
    messages = copy.deepcopy(chat.messages)
    messages[2]["tool_calls"][0]["function"]["arguments"] = arguments
    chat.send([*messages, user("sure?")], reply="yes<|im_end|>")
    assert_all_sampled_tokens_are_trained(chat)


def test_changed_tool_list_starts_a_sequence_and_is_shown(chat):
    chat.send([*chat.messages, user("sure?")], reply="yes<|im_end|>", tools=OTHER_TOOLS)
    assert_all_sampled_tokens_are_trained(chat, tools=1)
    expected, received = example(chat, "tools")
    assert '"name": "weather"' in expected
    assert '"name": "search"' in received
    assert "search" in chat.tokenizer.decode(chat.engine.prompts[-1])


def test_tool_list_with_another_order_of_keys_is_no_change(chat):
    (described,) = TOOLS
    reordered = [{"function": dict(reversed(described["function"].items())), "type": "function"}]
    chat.send([*chat.messages, user("sure?")], reply="yes<|im_end|>", tools=reordered)
    assert_all_sampled_tokens_are_trained(chat)


def test_repeated_request_starts_a_sequence_for_each_alternative(chat):
    for _ in range(2):
        chat.send(chat.messages[:4], reply="wet<|im_end|>")
    assert_all_sampled_tokens_are_trained(chat, repeated=2)
    prompts = {tuple(row.token_ids[: -row.turns[-1][1]]) for row in chat.rows()}
    assert len(prompts) == 1, "all alternatives have the same prompt"


def test_concurrent_alternatives_are_counted_like_sequential_ones(bpe):
    chat = Chat(CHATML, bpe)
    chat.engine.ids = chat.tokenizer.encode("x<|im_end|>")

    async def run():
        await asyncio.gather(*(chat.session.generate([user("hello")]) for _ in range(4)))

    asyncio.run(run())
    assert chat.forks == {"repeated": 3}
    assert len(chat.rows()) == 4


def test_equal_alternatives_are_continued_one_each(bpe):
    chat = Chat(CHATML, bpe)
    for _ in range(2):
        got = chat.send([user("hello")], reply="x<|im_end|>")
    for question in ("one", "two"):
        chat.send([user("hello"), got.message, user(question)], reply="y<|im_end|>")
    assert_all_sampled_tokens_are_trained(chat, repeated=1)
    assert [sum(row.response_mask) for row in chat.rows()] == [4, 4]


def test_equal_alternatives_are_told_apart_by_reasoning_and_call_ids(bpe):
    chat = Chat(QWEN3, bpe, tools=TOOLS)
    replies = [
        chat.send([user("hello")], reply=QWEN3.reply("", reasoning=reasoning, calls=[{}])).message
        for reasoning in ("aaa", "bbb", "bbb")
    ]
    for number, reply in enumerate(replies):
        chat.send([user("hello"), reply, tool("rain", f"call-{number}-0")], reply="x<|im_end|>")
    parents = [turn.parent for turn in chat.session.recorder.turns[3:]]
    assert parents == list(chat.session.recorder.turns[:3])
    assert_all_sampled_tokens_are_trained(chat, repeated=2)


def test_shortened_history_starts_a_sequence(chat):
    chat.ask(user("sure?"), reply="yes<|im_end|>")
    chat.send([*chat.messages[:2], *chat.messages[4:], user("really?")], reply="yes<|im_end|>")
    assert_all_sampled_tokens_are_trained(chat, shortened=1)
    expected, received = example(chat, "shortened")
    assert "I look." in expected
    assert received.startswith('{"role": "assistant", "content": "wet"}')


def test_request_that_ends_before_the_recorded_one_is_shortened(bpe):
    chat = Chat(CHATML, bpe)
    chat.ask(user("one"), user("two"), reply="x<|im_end|>")
    chat.send([user("one")], reply="y<|im_end|>")
    assert_all_sampled_tokens_are_trained(chat, shortened=1)


@pytest.mark.parametrize("messages", [[user("poem!")], [SYSTEM, user("poem!")]])
def test_unrelated_conversation_starts_a_sequence(chat, messages):
    chat.send(messages, reply="roses<|im_end|>", tools=None if len(messages) == 1 else TOOLS)
    assert_all_sampled_tokens_are_trained(chat, unrelated=1)
    assert "poem!" in example(chat, "unrelated")[1]


def test_long_example_starts_shortly_before_the_first_difference(bpe):
    chat = Chat(CHATML, bpe)
    chat.ask(user("hello " * 2000 + "one"), reply="x<|im_end|>")
    chat.ask(user("please continue"), reply="y<|im_end|>")
    edited = [user("hello " * 2000 + "two"), *chat.messages[1:], user("more")]
    chat.send(edited, reply="z<|im_end|>")
    expected, received = example(chat, "unrelated")
    assert expected.startswith("...")
    assert 'one"' in expected[:50]
    assert 'two"' in received[:50]


@pytest.mark.parametrize(
    "change",
    [
        lambda reply: {name: value for name, value in reply.items() if name != "reasoning_content"},
        lambda reply: reply | {"content": None},
        lambda reply: reply | {"content": [{"type": "text", "text": ""}]},
        lambda reply: reply | {"refusal": None, "annotations": [], "function_call": None, "audio": None},
        lambda reply: reply | {"name": "bot", "tool_calls": json.loads(json.dumps(reply["tool_calls"]))},
    ],
    ids=["drops reasoning", "null content", "content parts", "null keys", "copies"],
)
def test_reply_that_a_client_writes_differently_is_continued(bpe, change):
    chat = Chat(QWEN3, bpe, tools=TOOLS)
    chat.ask(user("weather?"), reply=QWEN3.reply("", reasoning="look", calls=[{"city": "Ulm"}]))
    chat.messages[-1] = change(chat.messages[-1])
    chat.ask(tool("rain"), reply=QWEN3.reply("wet", reasoning="done"))
    assert_all_sampled_tokens_are_trained(chat)
    assert "look" in chat.tokenizer.decode(chat.engine.prompts[1])


def test_dump_of_an_openai_message_is_continued(bpe):
    chat_types = pytest.importorskip("openai.types.chat")
    chat = Chat(QWEN3, bpe, tools=TOOLS)
    got = chat.ask(user("weather?"), reply=QWEN3.reply("hm", reasoning="look", calls=[{"city": "Ulm"}]))
    chat.messages[-1] = chat_types.ChatCompletionMessage.model_validate(got.message).model_dump()
    assert chat.messages[-1]["refusal"] is None
    chat.ask(tool("rain"), reply=QWEN3.reply("wet", reasoning="done"))
    assert_all_sampled_tokens_are_trained(chat)


def test_reply_that_the_caller_changes_in_place_is_an_edit(bpe):
    chat = Chat(QWEN25, bpe, tools=TOOLS)
    chat.ask(user("weather?"), reply=QWEN25.reply("", calls=[{"city": "Ulm"}]))
    chat.messages[-1]["tool_calls"][0]["function"]["arguments"] = "{}"
    chat.send([*chat.messages, tool("rain")], reply="wet<|im_end|>")
    assert_all_sampled_tokens_are_trained(chat, edited=1)
    assert "Ulm" in example(chat, "edited")[0]


def test_messages_without_a_recorded_reply_are_context(bpe):
    chat = Chat(CHATML, bpe)
    chat.ask(user("hello"), {"role": "assistant", "content": "hi"}, user("again"), reply="x<|im_end|>")
    chat.ask(user("one"), {"role": "assistant", "content": "two"}, user("three"), reply="y<|im_end|>")
    assert_all_sampled_tokens_are_trained(chat)
    assert chat.tokenizer.decode(chat.row().token_ids) == chat.rendered().rstrip("\n")


def test_branch_continues_the_conversation_it_was_created_from_as_context(chat):
    branch = chat.session.branch("critic")
    chat.send([*chat.messages, user("sure?")], reply="no<|im_end|>", session=branch)
    chat.ask(user("thanks"), reply="bye<|im_end|>")
    main, critic = sorted(chat.rows(), key=lambda row: row.branch == "critic")
    assert [sum(main.response_mask), sum(critic.response_mask)] == [len(chat.sampled) - 3, 3]
    assert critic.token_ids[: main.num_prompt_tokens] == main.token_ids[: main.num_prompt_tokens]
    assert len(critic.turns) == 3
    assert chat.forks == {}
    assert sorted(chat.trained()) == sorted(chat.sampled)


def test_branch_does_not_change_the_conversation_it_was_created_from(chat):
    branch = chat.session.branch()
    branched = chat.send([*chat.messages, user("sure?")], reply="no<|im_end|>", session=branch)
    chat.send([*chat.messages, user("sure?"), branched.message, user("so?")], reply="x<|im_end|>")
    (first,) = [row for row in chat.rows() if row.branch == "branch-1"]
    (second,) = [row for row in chat.rows() if row.branch == "main"]
    assert (len(first.turns), len(second.turns)) == (3, 3), "the reply of the branch is context in main"
    assert sorted(chat.trained()) == sorted(chat.sampled)


def test_tokens_of_untrained_branches_are_reported(chat):
    critic = chat.session.branch("critic", is_trained=False)
    chat.send([user("poem!")], reply="roses<|im_end|>", session=critic)
    inner = critic.branch("inner")
    chat.send(
        [user("poem!"), {"role": "assistant", "content": "roses"}, user("more")], reply="x<|im_end|>", session=inner
    )
    metrics = chat.session.metrics()
    untrained = len(chat.tokenizer.encode("roses<|im_end|>"))
    assert metrics["num_untrained_branch_tokens"] == untrained
    assert metrics["num_trained_tokens"] == metrics["num_sampled_tokens"] - untrained
    assert [row.branch for row in chat.rows()] == ["main", "inner"]
    assert sum(chat.rows()[1].response_mask) == 2


def test_prompt_of_tokens_continues_the_longest_recorded_prefix(bpe):
    chat = Chat(CHATML, bpe)
    first = chat.tokenizer.encode("hello world")
    for reply in ([7, 8], [7, 8, 9]):
        chat.send(None, token_ids=first, reply=reply, tools=None)
    chat.send(None, token_ids=[*first, 7, 8, 9, 10], reply=[11], tools=None)
    chat.send(None, token_ids=[*first, 7, 8, 9, 10, 11], reply=[12], tools=None)
    assert [turn.context_ids for turn in chat.session.recorder.turns[2:]] == [[10], []]
    assert [list(row.token_ids) for row in chat.rows()] == [[*first, 7, 8], [*first, *range(7, 13)]]
    assert_all_sampled_tokens_are_trained(chat, repeated=1)


def test_prompt_of_tokens_that_continues_nothing_is_counted(bpe):
    chat = Chat(CHATML, bpe)
    chat.send(None, token_ids=chat.tokenizer.encode("hello world"), reply=[7], tools=None)
    chat.send(None, token_ids=chat.tokenizer.encode("hello weather"), reply=[7], tools=None)
    assert_all_sampled_tokens_are_trained(chat, edited=1)
    assert example(chat, "edited") == ("hello world", "hello weather")


def test_versions_are_those_of_the_tokens_with_mask_1(chat):
    for row in chat.rows():
        assert sum(count for _, count in row.versions) == sum(row.response_mask)


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_every_sampled_token_is_trained_once_whatever_the_client_sends(bpe, data):
    """A client that edits, repeats, shortens and branches at random: one sequence per branch and fork."""
    family = data.draw(st.sampled_from([CHATML, QWEN3, QWEN25]))
    chat = Chat(family, bpe, keep_reasoning=data.draw(st.booleans()))
    sessions, conversations = [chat.session], [[user("hello")]]
    count = data.draw(st.integers(1, 8))
    for number in range(count):
        session = data.draw(st.sampled_from(sessions))
        messages = list(data.draw(st.sampled_from(conversations)))
        match data.draw(st.sampled_from(["continue", "continue", "edit", "drop", "branch", "tools"])):
            case "edit":
                place = data.draw(st.integers(0, len(messages) - 1))
                messages[place] = messages[place] | {"content": f"edit {number}"}
            case "drop" if len(messages) > 2:
                del messages[data.draw(st.integers(0, len(messages) - 2))]
            case "branch":
                sessions.append(session := session.branch())
            case "tools" if family.call:
                chat.tools = None if chat.tools else TOOLS
        answer = data.draw(st.sampled_from(["x", "y"]))
        reply = family.reply(answer, reasoning=data.draw(st.sampled_from(["", "why"]))) if family.thinks else answer
        got = chat.send(messages, reply=reply, session=session)
        conversations.append([*messages, got.message, user(f"question {number}")])
    assert sorted(chat.trained()) == sorted(chat.sampled)
    started = {turn.branch for turn in chat.session.recorder.turns}
    assert len(chat.rows()) == len(started) + sum(chat.forks.values())
    for row in chat.rows():
        assert len(row.response_mask) == len(row.response_ids) == len(row.rollout_log_probs)
        assert sum(sum(turn) for turn in row.turns) == len(row.token_ids)


def test_tools_that_the_caller_extends_do_not_change_the_record(bpe):
    chat = Chat(QWEN25, bpe)
    other = json.loads(json.dumps(TOOLS[0]).replace("weather", "traffic"))
    tools = list(TOOLS)
    reply = chat.send([user("hi")], reply="yes<|im_end|>", tools=tools)
    tools.append(other)
    following = [user("hi"), reply.message, user("go")]
    chat.send(following, reply="yes<|im_end|>", tools=tools)
    example = chat.session.recorder.fork_examples["tools"]
    assert example.expected != example.received
    chat.send(following, reply="yes<|im_end|>", tools=list(TOOLS))
    assert "traffic" not in chat.tokenizer.decode(chat.engine.prompts[-1])
    assert chat.forks == {"tools": 1}


def test_edited_reasoning_is_an_edit(bpe):
    chat = Chat(QWEN3, bpe, tools=TOOLS)
    chat.ask(user("weather?"), reply=QWEN3.reply("", reasoning="long", calls=[{"city": "Ulm"}]))
    chat.messages[-1] = chat.messages[-1] | {"reasoning_content": "short"}
    chat.ask(tool("rain"), reply=QWEN3.reply("wet", reasoning="done"))
    assert chat.forks == {"edited": 1}
    prompt = chat.tokenizer.decode(chat.engine.prompts[-1])
    assert "short" in prompt
    assert "long" not in prompt


def test_other_name_of_a_speaker_is_an_edit(bpe, scripted):
    role = "{{ message.role }}"
    tokenizer = bpe(PLAIN_CHATML.replace(role, role + "{{ ' ' + message.name if message.name }}"))
    policy = scripted("yes<|im_end|>", tokenizer=tokenizer)
    session = policy.session()
    reply = asyncio.run(session.generate([user("hi") | {"name": "alice"}]))
    asyncio.run(session.generate([user("hi") | {"name": "bob"}, reply.message, user("and?")]))
    prompt = tokenizer.decode(policy.engine.requests[-1][0])
    assert "bob" in prompt
    assert "alice" not in prompt
