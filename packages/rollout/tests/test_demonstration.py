"""Demonstrations have the tokens and the mask that the recorder gives to the same conversation."""

from functools import partial

import pytest
from template_cases import FAMILIES, GLM, QWEN3, QWEN25, SYSTEM, TOOLS, WITH_TOOLS, Chat, tool, user
from tidemill_rollout import ChatTemplate, Generation, Policy, TemplateError, demonstration
from transformers import LlamaTokenizer


def assert_equals_recorded_row(chat: Chat, num_prompt: int) -> None:
    prompt, response = chat.messages[:num_prompt], chat.messages[num_prompt:]
    row = demonstration(chat.session.template, prompt, response, chat.tools)
    recorded = chat.row()
    assert list(row.token_ids) == list(recorded.token_ids)
    assert list(row.response_mask) == list(recorded.response_mask)
    assert (row.num_prompt_tokens, row.turns) == (recorded.num_prompt_tokens, recorded.turns)


@pytest.mark.parametrize("family", WITH_TOOLS, ids=lambda family: family.name)
def test_tool_calls_and_results_equal_the_recorded_conversation(family, bpe):
    chat = Chat(family, bpe, tools=TOOLS)
    chat.ask(SYSTEM, user("weather?"), reply=family.reply("", reasoning="look", calls=[{"city": "Ulm"}]))
    chat.ask(tool("rain"), reply=family.reply("", reasoning="again", calls=[{"city": "Bonn", "n": 1.5}]))
    chat.ask(tool("sun", "call-1-0"), reply=family.reply("mixed", reasoning="done"))
    assert_equals_recorded_row(chat, num_prompt=2)


@pytest.mark.parametrize("family", [family for family in FAMILIES if family is not GLM], ids=lambda family: family.name)
def test_answers_to_users_equal_the_recorded_conversation(family, bpe):
    chat = Chat(family, bpe, keep_reasoning=True)
    for question, answer in [("hello world", "the answer"), ("what?", ""), ("why?", "forty-two")]:
        chat.ask(user(question), reply=family.reply(answer))
    assert_equals_recorded_row(chat, num_prompt=1)


def test_reply_ends_with_the_end_token_where_the_template_writes_none(bpe):
    template = ChatTemplate(GLM.tokenizer(bpe))
    row = demonstration(template, [user("hello")], [{"role": "assistant", "content": "the answer"}])
    assert template.tokenizer.decode(row.response_ids).endswith("the answer" + str(template.tokenizer.eos_token))


def test_earlier_replies_of_the_prompt_are_not_trained_on(bpe):
    template = ChatTemplate(QWEN25.tokenizer(bpe))
    prompt = [user("hello"), {"role": "assistant", "content": "world"}, user("again")]
    row = demonstration(template, prompt, [{"role": "assistant", "content": "the answer"}])
    trained = [token for token, mask in zip(row.response_ids, row.response_mask, strict=True) if mask]
    assert template.tokenizer.decode(trained) == "the answer<|im_end|>"
    assert "world" in template.tokenizer.decode(row.prompt_ids)


def test_template_that_drops_the_reasoning_of_an_earlier_reply_is_refused(bpe):
    template = ChatTemplate(QWEN3.tokenizer(bpe))
    reply = {"role": "assistant", "reasoning_content": "think", "content": "x"}
    with pytest.raises(TemplateError, match=r"changes earlier replies .* messages\[3\].*split the demonstration"):
        demonstration(template, [user("hello")], [reply, user("again"), reply])


@pytest.mark.parametrize("roles", [[], ["assistant", "tool"], ["tool", "assistant"]])
def test_demonstration_that_does_not_start_and_end_with_a_reply_is_refused(roles, bpe):
    response = [{"role": role, "content": "x"} for role in roles]
    with pytest.raises(ValueError, match="must start and end with a reply of the assistant, got the roles"):
        demonstration(ChatTemplate(QWEN25.tokenizer(bpe)), [user("hello")], response)


def _call(name):
    return {"type": "function", "function": {"name": name, "arguments": {}}}


@pytest.mark.parametrize(
    ("content", "reply", "ignored"),
    [
        ("{{ message.content }}", {"content": "x", "reasoning_content": "R"}, "reasoning_content"),
        ("{{ message.content }}", {"content": "x", "tool_calls": [_call("look")]}, "tool_calls"),
        ("{{ message.tool_calls }}", {"content": "x", "tool_calls": [_call("look")]}, "content"),
    ],
)
@pytest.mark.parametrize("is_marked", [False, True])
def test_part_of_a_reply_that_the_template_ignores_is_named(content, reply, ignored, is_marked, bpe):
    if is_marked:
        content = f"{{% generation %}}{content}{{% endgeneration %}}"
    template = ChatTemplate(
        bpe(
            "{% for message in messages %}<|im_start|>{% if message.role == 'assistant' %}"
            + f"{content}{{% else %}}{{{{ message.content }}}}{{% endif %}}<|im_end|>{{% endfor %}}"
            + "{% if add_generation_prompt %}<|im_start|>{% endif %}"
        )
    )
    prompt, response = [user("hello")], [{"role": "assistant", **reply}]
    encode = (
        partial(template.encode_marked, [*prompt, *response], None)
        if is_marked
        else partial(demonstration, template, prompt, response)
    )
    with pytest.raises(TemplateError, match=rf"the chat template ignores {ignored} of messages\[1\], .*; remove it"):
        encode()


_ZEPHYR = (
    "{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + eos_token + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)
_LLAMA2 = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}{{ '[INST] ' + m.content + ' [/INST]' }}"
    "{% else %}{{ ' ' + m.content + ' ' + eos_token }}{% endif %}{% endfor %}"
)


@pytest.mark.parametrize("legacy", [True, False])
@pytest.mark.parametrize("source", [_ZEPHYR, _LLAMA2], ids=["zephyr", "llama2"])
def test_reply_has_no_space_that_sentencepiece_puts_before_a_text(source, legacy):
    pieces = ["<unk>", "<s>", "</s>", *map(chr, range(33, 127)), "▁", "\n", "▁b", "▁d", "▁▁"]
    vocab = {piece: number for number, piece in enumerate(pieces)}
    merges = [("▁", "b"), ("▁", "d"), ("▁", "▁")]
    tokenizer = LlamaTokenizer(vocab=vocab, merges=merges, legacy=legacy)
    tokenizer.chat_template = source
    messages = [user("a"), {"role": "assistant", "content": "b"}, user("c"), {"role": "assistant", "content": "d"}]
    expected = tokenizer.apply_chat_template(messages, tokenize=True, return_dict=True)["input_ids"]
    row = demonstration(ChatTemplate(tokenizer), messages[:1], messages[1:])
    assert list(row.token_ids) == expected[: len(row.token_ids)]


@pytest.mark.parametrize("legacy", [True, False])
def test_new_messages_start_without_the_space_of_sentencepiece_where_no_token_ends_a_reply(legacy):
    pieces = ["<unk>", "<s>", "</s>", *map(chr, range(33, 127)), "▁", "\n", "▁b"]
    vocab = {piece: number for number, piece in enumerate(pieces)}
    tokenizer = LlamaTokenizer(vocab=vocab, merges=[("▁", "b")], legacy=legacy)
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role + ':' + (' ' + m.content if m.role == 'user' else m.content) + '\n' }}"
        "{% endfor %}{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"
    )
    policy = Policy(None, tokenizer)
    session = policy.session()
    recorder = session.recorder
    prompt = recorder.prompt_from_messages([user("a")], None, "main")
    reply = Generation(token_ids=[vocab["▁b"]], log_probs=[-1.0], finish_reason="length", versions=[("", 1)])
    recorder.record(prompt, reply, {"role": "assistant", "content": " b"})
    messages = [user("a"), {"role": "assistant", "content": " b"}, user("c")]
    expected = tokenizer.apply_chat_template(messages, tokenize=True, add_generation_prompt=True, return_dict=True)
    assert recorder.prompt_from_messages(messages, None, "main").token_ids == expected["input_ids"]
