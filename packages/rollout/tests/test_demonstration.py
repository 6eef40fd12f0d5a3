"""Demonstrations have the tokens and the mask that the recorder gives to the same conversation."""

import pytest
from template_cases import FAMILIES, GLM, QWEN3, QWEN25, SYSTEM, TOOLS, WITH_TOOLS, Chat, tool, user
from tidemill_rollout import ChatTemplate, TemplateError, demonstration


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
