"""Templates of model families: the recorded tokens of a conversation are the template's own rendering of it."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from template_cases import (
    CHATML,
    FAMILIES,
    GLM,
    LLAMA3,
    LLAMA31,
    MISTRAL_LIKE,
    QWEN3,
    QWEN3_THINKING,
    QWEN25,
    REMOVES_ALL_REASONING,
    SYSTEM,
    SYSTEM_WITH_LAST_USER,
    TOOLS,
    WITH_TOOLS,
    Chat,
    Family,
    tool,
    user,
)
from tidemill_rollout import ChatTemplate, TemplateError
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

EMPTY_REASONING = re.compile(r"<think>\s*</think>\s*")
UNICODE = "naïve 🙂👩‍👩‍👧 e\u0301\u0323 日本語 \u202eright\u202c\t<b>&amp;</b>"

by_name = pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
with_tools = pytest.mark.parametrize("family", WITH_TOOLS, ids=lambda family: family.name)


def assert_is_the_template_s_rendering(chat: Chat) -> None:
    """The single row decodes to the template's text, and exactly the sampled tokens are trained on.

    Empty reasoning blocks are ignored: Qwen3 writes them into the prompt or the last reply and removes them later.
    """
    row = chat.row()
    text = str(chat.tokenizer.decode(row.token_ids))
    expected = chat.rendered().rstrip("\n")
    if not chat.family.closes:
        expected += chat.family.end
    assert EMPTY_REASONING.sub("", text) == EMPTY_REASONING.sub("", expected)
    assert chat.trained() == chat.sampled
    assert chat.forks == {}
    metrics = chat.session.metrics()
    assert metrics["num_trained_tokens"] == metrics["num_sampled_tokens"] == len(chat.sampled)


@by_name
@pytest.mark.parametrize("keep_reasoning", [False, True])
def test_user_turns_continue_the_sampled_tokens(family, keep_reasoning, bpe):
    chat = Chat(family, bpe, keep_reasoning=keep_reasoning)
    if family.has_system:
        chat.messages.append(SYSTEM)
    # reasoning would be removed at the next user message
    for question, answer in [("hello world", "the answer"), (UNICODE, UNICODE), ("what?", "forty-two")]:
        chat.ask(user(question), reply=family.reply(answer))
    assert_is_the_template_s_rendering(chat)


@with_tools
def test_tool_loop_continues_the_sampled_tokens(family, bpe):
    chat = Chat(family, bpe, tools=TOOLS)
    chat.ask(SYSTEM, user("weather?"), reply=family.reply("", reasoning="look", calls=[{"city": UNICODE}]))
    chat.ask(tool('{"sun": true}'), reply=family.reply("", reasoning="again", calls=[{"city": "Ulm", "n": 1.5}]))
    got = chat.ask(tool("", "call-1-0"), reply=family.reply("sunny", reasoning="done"))
    assert got.message["content"] == "sunny"
    assert got.message.get("reasoning_content") == ("done" if family.thinks else None)
    assert_is_the_template_s_rendering(chat)


@pytest.mark.parametrize("family", [QWEN25, QWEN3, QWEN3_THINKING], ids=lambda family: family.name)
def test_several_calls_and_consecutive_tool_results_continue_the_sampled_tokens(family, bpe):
    chat = Chat(family, bpe, tools=TOOLS)
    calls = [{"city": "Ulm"}, {"city": "Bonn"}, {}]
    got = chat.ask(user("weather?"), reply=family.reply("I look.", reasoning="two cities", calls=calls))
    assert [call["id"] for call in got.tool_calls] == ["call-0-0", "call-0-1", "call-0-2"]
    chat.ask(*[tool("rain", call["id"]) for call in got.tool_calls], reply=family.reply("It rains.", reasoning="ok"))
    assert_is_the_template_s_rendering(chat)


@by_name
def test_empty_answers_continue_the_sampled_tokens(family, bpe):
    chat = Chat(family, bpe)
    for question in ("hello", "", "again"):
        chat.ask(user(question), reply=family.reply(""))
    assert_is_the_template_s_rendering(chat)


@by_name
def test_context_does_not_depend_on_the_sampled_tokens(family, bpe):
    """Replies of one token per character, and of tokens that would merge with the prompt, change no other token."""

    def contexts(*replies: str, split: bool) -> list[list[int]]:
        chat = Chat(family, bpe, keep_reasoning=True)
        for number, reply in enumerate(replies):
            end = chat.tokenizer.convert_tokens_to_ids(family.end)
            ids = (
                [id for char in reply for id in chat.tokenizer.encode(char)] if split else chat.tokenizer.encode(reply)
            )
            chat.ask(user(f"question {number}"), reply=[*ids, end])
        assert chat.trained() == chat.sampled
        assert chat.forks == {}
        return [turn.context_ids for turn in chat.session.recorder.turns]

    expected = contexts("the answer", "hello", "x", split=False)
    assert contexts("the answer", "hello", "x", split=True) == expected
    assert contexts("\nthe weather", " hello \n", "", split=False) == expected
    assert contexts("<|im_end", "the answer " * 50, "</s", split=True) == expected


@by_name
def test_cut_off_reply_is_closed_by_the_template_s_text(family, bpe):
    whole, cut = Chat(family, bpe), Chat(family, bpe)
    whole.ask(user("hello"), reply=family.reply("the answer"))
    cut.ask(user("hello"), reply=family.reply("the answer").removesuffix(family.end))
    for chat in (whole, cut):
        chat.ask(user("again"), reply="x" + family.end)
    assert cut.engine.prompts[1] == whole.engine.prompts[1]
    assert cut.trained() == cut.sampled
    assert sum(cut.row().response_mask) == sum(whole.row().response_mask) - 1


@by_name
def test_limit_of_new_tokens_on_the_end_token_closes_the_reply_once(family, bpe):
    chat = Chat(family, bpe)
    chat.ask(user("hello"), reply=family.reply("the answer"), finish="length")
    chat.ask(user("again"), reply=family.reply("x"))
    assert_is_the_template_s_rendering(chat)


@by_name
def test_stop_string_stays_in_the_tokens_and_leaves_the_message(family, bpe):
    chat = Chat(family, bpe)
    sampled = family.reply("the answer\nUser:").removesuffix(family.end)
    got = chat.ask(user("hello"), reply=sampled, finish="stop", stop=["User:", "never"])
    assert got.message["content"].endswith("the answer\n")
    assert got.text.endswith("the answer\nUser:")
    chat.ask(user("again"), reply="x" + family.end)
    assert chat.trained() == chat.sampled
    assert chat.forks == {}
    start = str(chat.tokenizer.decode(chat.engine.prompts[0]))
    ends = chat.rendered(
        [user("hello"), {"role": "assistant", "content": "@"}, user("again")], add_generation_prompt=True
    )
    assert chat.tokenizer.decode(chat.engine.prompts[1]) == start + sampled + ends.rpartition("@")[2]


@pytest.mark.parametrize("end", ["<|user|>", "<|observation|>", "<|endoftext|>"])
def test_end_token_that_opens_the_next_message_is_written_once(end, bpe):
    chat = Chat(GLM, bpe)
    chat.ask(user("hello"), reply="\nthe answer" + end)
    chat.ask(user("again"), reply="\nx<|user|>")
    text = chat.tokenizer.decode(chat.engine.prompts[1])
    assert text.endswith("the answer" + {"<|user|>": ""}.get(end, end) + "<|user|>\nagain<|assistant|>")


def test_sampled_end_token_replaces_the_one_of_the_template(bpe):
    chat = Chat(QWEN25, bpe)
    chat.ask(user("hello"), reply="the answer<|endoftext|>")
    chat.ask(user("again"), reply="x<|im_end|>")
    text = chat.tokenizer.decode(chat.engine.prompts[1])
    assert "the answer<|endoftext|>\n<|im_start|>user\nagain<|im_end|>" in text


def test_tokenizer_that_prepends_spaces_gets_the_tokens_of_the_whole_text():
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")  # type: ignore[assignment]
    trainer = trainers.BpeTrainer(vocab_size=200, special_tokens=["<unk>", "<s>", "</s>"], show_progress=False)
    tokenizer.train_from_iterator(["[INST] hello world [/INST] the answer"] * 9, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        chat_template=MISTRAL_LIKE.template,
    )
    assert fast.encode("[INST]") != fast.encode("</s>[INST]")[1:]
    chat = Chat(MISTRAL_LIKE, lambda *_, **__: fast)
    for question in ("hello", "world"):
        ids = fast.encode("x</s>")
        chat.ask(user(question), reply=ids)
    follows = fast.encode("</s>[INST] world [/INST]")[1:]
    assert chat.engine.prompts[1] == [*chat.engine.prompts[0], *fast.encode("x</s>"), *follows]


TEXT = st.text(st.characters(codec="utf-8", exclude_characters="\x00"), max_size=12) | st.sampled_from(
    ["", " ", "\n", "</think>", "<tool_call>", "[INST]", "}", UNICODE]
)
QUESTION = st.builds(user, TEXT)


@settings(max_examples=150, deadline=None)
@given(
    family=st.sampled_from([*FAMILIES]),
    turns=st.lists(st.tuples(QUESTION, TEXT, st.booleans()), min_size=1, max_size=5),
    is_split=st.booleans(),
)
def test_any_linear_conversation_has_one_row_with_the_template_s_context(bpe, family, turns, is_split):
    """Whatever is sampled, what stands between the replies is what the template writes between other replies."""
    chat, plain = Chat(family, bpe, keep_reasoning=True), Chat(family, bpe, keep_reasoning=True)
    encode = chat.tokenizer.encode
    for question, answer, is_cut in turns:
        ids = [id for char in answer for id in encode(char)] if is_split else encode(answer)
        end = [] if is_cut else encode(family.end)
        chat.ask(question, reply=[*ids, *end])
        plain.ask(question, reply=[*encode("the answer"), *end])
    row = chat.row()
    assert [turn.context_ids for turn in chat.session.recorder.turns] == [
        turn.context_ids for turn in plain.session.recorder.turns
    ]
    assert chat.trained() == chat.sampled
    assert list(row.token_ids[: row.num_prompt_tokens]) == encode(
        chat.rendered(chat.messages[:1], add_generation_prompt=True)
    )
    assert chat.forks == {}


def test_reasoning_that_the_template_removes_starts_a_sequence(bpe):
    chat = Chat(QWEN3, bpe)
    chat.ask(user("hello"), reply=QWEN3.reply("the answer", reasoning="long thoughts"))
    chat.ask(user("again"), reply=QWEN3.reply("x", reasoning="more"))
    first, second = chat.rows()
    assert "long thoughts" in chat.tokenizer.decode(first.token_ids)
    assert chat.tokenizer.decode(second.prompt_ids) == chat.rendered(chat.messages[:3], add_generation_prompt=True)
    assert chat.trained() == chat.sampled
    assert chat.forks == {"reasoning": 1}
    example = chat.session.recorder.fork_examples["reasoning"]
    assert "<think>\nlong thoughts" in example.expected
    assert "the answer<|im_end|>" in example.received


def test_kept_reasoning_continues_the_sampled_tokens(bpe):
    chat = Chat(QWEN3, bpe, keep_reasoning=True)
    replies = [QWEN3.reply("the answer", reasoning="long thoughts"), QWEN3.reply("x", reasoning="more")]
    for question, reply in zip(("hello", "again"), replies, strict=True):
        chat.ask(user(question), reply=reply)
    text = chat.tokenizer.decode(chat.row().token_ids)
    prompt = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n{}"
    assert text == "\n".join(
        prompt.format(question, reply) for question, reply in zip(("hello", "again"), replies, strict=True)
    )
    assert chat.forks == {}


@pytest.mark.parametrize(
    ("reply", "finish", "text"),
    [
        ("<|user|>", None, "<|assistant|><|user|>\nagain"),
        ("\n<|user|>", None, "<|assistant|>\n<|user|>\nagain"),
        ("\n", "length", "<|assistant|>\n<|user|>\nagain"),
        ("\nyes<|user|>", None, "<|assistant|>\nyes<|user|>\nagain"),
    ],
)
def test_empty_reply_without_an_end_token_is_followed_by_the_next_message(reply, finish, text, bpe):
    family = Family(
        name="like GLM-4",
        template="{% for message in messages %}<|{{ message.role }}|>\n{{ message.content }}{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}",
        special_tokens=("<|assistant|>", "<|user|>"),
        closes=False,
    )
    chat = Chat(family, bpe)
    chat.ask(user("hello"), reply=reply, finish=finish)
    chat.ask(user("again"), reply="\nx<|user|>")
    assert chat.tokenizer.decode(chat.row().token_ids) == f"<|user|>\nhello{text}<|assistant|>\nx<|user|>"
    assert chat.forks == {}


@pytest.mark.parametrize("question", ["hello", "long thoughts?"])
@pytest.mark.parametrize("keep_reasoning", [False, True])
def test_template_that_removes_all_reasoning_is_noticed(keep_reasoning, question, bpe):
    family = Family(name="removes", template=REMOVES_ALL_REASONING, thinks=True, opens_thinking=True)
    chat = Chat(family, bpe, keep_reasoning=keep_reasoning)
    chat.ask(user(question), reply=family.reply("the answer", reasoning="long thoughts"))
    chat.ask(user("again"), reply=family.reply("x", reasoning="more"))
    assert chat.forks == ({} if keep_reasoning else {"reasoning": 1})
    counts = (question.count("long thoughts"), chat.tokenizer.decode(chat.engine.prompts[1]).count("long thoughts"))
    assert counts[1] - counts[0] == keep_reasoning
    assert chat.trained() == chat.sampled


def test_reasoning_that_the_client_drops_in_a_tool_loop_stays_in_the_tokens(bpe):
    chat = Chat(QWEN3, bpe, tools=TOOLS)
    for number in range(3):
        new = tool("rain", f"call-{number - 1}-0") if number else user("weather?")
        got = chat.ask(new, reply=QWEN3.reply("", reasoning=f"thought {number}", calls=[{"city": "Ulm"}]))
        chat.messages[-1] = {name: value for name, value in got.message.items() if name != "reasoning_content"}
    assert chat.forks == {}
    chat.ask(user("again"), reply=QWEN3.reply("x"))
    assert chat.forks == {"reasoning": 1}, "also the reasoning of the earlier replies is removed"


def test_template_that_moves_the_system_prompt_starts_a_sequence(bpe):
    family = Family(name="moves", template=SYSTEM_WITH_LAST_USER, special_tokens=("<s>", "</s>"))
    chat = Chat(family, bpe)
    for question in ("hello", "again"):
        chat.ask(*([] if chat.messages else [SYSTEM]), user(question), reply="x</s>")
    assert [chat.tokenizer.decode(prompt) for prompt in chat.engine.prompts] == [
        "[INST] the answer is short hello [/INST]",
        "[INST] hello [/INST] x</s>[INST] the answer is short again [/INST]",
    ]
    assert chat.forks == {"template": 1}
    assert chat.trained() == chat.sampled


def test_template_that_raises_is_reported_with_the_roles(bpe):
    chat = Chat(MISTRAL_LIKE, bpe)
    with pytest.raises(
        TemplateError, match=r"rejects these 2 messages \(roles user, user\): .*must alternate.*; change"
    ):
        chat.ask(user("hello"), user("again"), reply="x</s>")


def test_two_calls_in_a_history_of_llama3_are_reported(bpe):
    chat = Chat(LLAMA31, bpe, tools=TOOLS)
    call = {"id": "a", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
    reply = {"role": "assistant", "content": None, "tool_calls": [call, call]}
    with pytest.raises(TemplateError, match="only supports single tool-calls at once"):
        chat.send([user("hello"), reply, tool("rain", "a")], reply="x<|eot_id|>")


def test_tokenizer_without_template_is_reported_and_accepts_text(bpe):
    chat = Chat(CHATML, lambda *_, **__: bpe(None))
    with pytest.raises(TemplateError, match=r"tokenizer has none: set tokenizer\.chat_template, or pass text= or"):
        chat.ask(user("hello"), reply="x<|im_end|>")
    chat.send(None, text="hello world", reply="x<|im_end|>")
    assert chat.tokenizer.decode(chat.row().token_ids) == "hello worldx<|im_end|>"


def test_developer_message_is_a_system_message_where_the_template_has_no_such_role(bpe):
    chat = Chat(QWEN25, bpe)
    chat.ask({"role": "developer", "content": "the answer is short"}, user("hello"), reply="x<|im_end|>")
    assert chat.tokenizer.decode(chat.engine.prompts[0]) == chat.rendered(
        [SYSTEM, user("hello")], add_generation_prompt=True
    )


@pytest.mark.parametrize(
    ("family", "is_open"), [(QWEN3_THINKING, True), (QWEN3, False), (LLAMA3, False)], ids=lambda value: str(value)[:30]
)
def test_prompt_that_opens_reasoning_is_recognized(family, is_open, bpe):
    tokenizer = family.tokenizer(bpe)
    template = ChatTemplate(tokenizer)
    text = template.render([user("<think>")], None, add_generation_prompt=True)
    assert template.opens_reasoning(template.encode(text)) == is_open


def test_generation_blocks_mark_the_tokens_of_replies(bpe):
    assert not ChatTemplate(CHATML.tokenizer(bpe)).marks_replies
    body = "{{ message.content }}<|im_end|>\n"
    template = ChatTemplate(
        bpe(
            "{% for message in messages %}<|im_start|>{{ message.role }}\n{% if message.role == 'assistant' %}"
            f"{{% generation %}}{body}{{% endgeneration %}}{{% else %}}{body}{{% endif %}}{{% endfor %}}"
        )
    )
    assert template.marks_replies
    messages = [user("hello"), {"role": "assistant", "content": "world"}, user("again")]
    ids, mask = template.encode_marked(messages, None)
    assert ids == template.encode(template.render(messages, None, add_generation_prompt=False))
    trained = [token for token, is_trained in zip(ids, mask, strict=True) if is_trained]
    assert template.tokenizer.decode(trained) == "world<|im_end|>\n"
