import json

import pytest
from tidemill_dataproto import ragged
from tidemill_trainer.data import DataError
from tidemill_trainer.demo.chat import TEMPLATE, chat_tokenizer
from tidemill_trainer.demo.model import piece_tokenizer
from tidemill_trainer.demo.shop import PIECES, conversation_rows
from tidemill_trainer.sft.config import SFTDataConfig
from tidemill_trainer.sft.dataset import Encoder, load_examples

MARKED = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.role == 'assistant' %}
        {%- generation %}{{- message.content + '<|im_end|>' }}{%- endgeneration %}
    {%- else %}
        {{- message.content + '<|im_end|>' }}
    {%- endif %}
{%- endfor %}
"""
# The reply is written differently once another message follows it.
REWRITING = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.role == 'assistant' and not loop.last %}{{- 'earlier ' }}{%- endif %}
    {{- message.content + '<|im_end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""


def user(content):
    return {"role": "user", "content": content}


def reply(content, **more):
    return {"role": "assistant", "content": content, **more}


def tokenizer_with(template):
    tokenizer = chat_tokenizer(PIECES)
    tokenizer.chat_template = template
    return tokenizer


def trained_texts(tokenizer, batch):
    """Return for each row the text of the trained tokens, and "·" for each of the others."""
    texts = []
    for ids, response, mask in zip(
        batch["input_ids"].unbind(), batch["responses"].unbind(), batch["response_mask"].unbind(), strict=True
    ):
        num_prompt = len(ids) - len(response)
        assert ids[num_prompt:].tolist() == response.tolist()
        flags = [0] * num_prompt + mask.int().tolist()
        pieces = [tokenizer.decode([token]) if flag else "·" for token, flag in zip(ids, flags, strict=True)]
        texts.append("".join(pieces).strip("·"))
    return texts


def load(write, tokenizer, rows, method="example", **settings):
    encoder = Encoder(tokenizer, SFTDataConfig(**settings))
    return load_examples([write("rows", rows)], getattr(encoder, method)), encoder


@pytest.mark.parametrize("template", [TEMPLATE, MARKED], ids=["rendered", "marked"])
def test_only_replies_are_trained_on_in_every_turn(write, template):
    tokenizer = tokenizer_with(template)
    messages = [{"role": "system", "content": "s"}, user("a"), reply("bc"), user("d"), reply("e")]
    batch, _ = load(write, tokenizer, [{"messages": messages}, {"messages": messages[1:3]}])
    full = tokenizer.apply_chat_template(messages, tokenize=True, return_dict=True)["input_ids"]
    assert batch["input_ids"].unbind()[0].tolist() == full
    assert trained_texts(tokenizer, batch) == ["bc<|im_end|>····e<|im_end|>", "bc<|im_end|>"]


def test_tool_calls_are_trained_on_and_tool_results_are_not(write):
    tokenizer = chat_tokenizer(PIECES)
    rows, _ = conversation_rows(num_train=8, num_val=0, seed=0)
    batch, _ = load(write, tokenizer, rows)
    for row, text in zip(rows, trained_texts(tokenizer, batch), strict=True):
        replies = [message for message in row["messages"] if message["role"] == "assistant"]
        expected = []
        for message in replies:
            calls = [json.loads(call["function"]["arguments"])["item"] for call in message.get("tool_calls", ())]
            texts = [
                f'<tool_call>\n{{"name": "scan", "arguments": {{"item": "{item}"}}}}\n</tool_call>' for item in calls
            ]
            expected.append("".join([message["content"], *texts, "<|im_end|>"]))
        assert [part for part in text.split("·") if part] == expected


def test_prompt_and_response_are_texts_or_messages(write):
    tokenizer = chat_tokenizer(PIECES)
    rows = [
        {"prompt": "ab", "response": "cd"},
        {"prompt": [user("ab")], "response": "cd"},
        {"prompt": [user("x"), reply("y"), user("ab")], "response": [reply("cd")]},
    ]
    batch, _ = load(write, tokenizer, rows)
    assert trained_texts(tokenizer, batch) == ["cd<|im_end|>"] * 3


@pytest.mark.parametrize("prompt", [[user("ab")], "ab"])
def test_text_after_messages_ends_as_the_template_ends_a_reply(write, prompt):
    tokenizer = chat_tokenizer(PIECES)
    tokenizer.add_special_tokens({"eos_token": "<|endoftext|>"})
    end = "<|endoftext|>" if isinstance(prompt, str) else "<|im_end|>"
    batch, _ = load(write, tokenizer, [{"prompt": prompt, "response": "<think>c</think>d"}])
    assert trained_texts(tokenizer, batch) == [f"<think>c</think>d{end}"]
    pair, _ = load(write, tokenizer, [{"prompt": prompt, "chosen": "c", "rejected": "d"}], "pair")
    assert trained_texts(tokenizer, pair) == [f"c{end}", f"d{end}"]


def test_truncation_drops_the_end_of_a_long_example(write):
    tokenizer = chat_tokenizer(PIECES)
    rows = [{"messages": [user("ab"), reply("cdefgh")]}, {"messages": [user("a"), reply("b")]}]
    batch, encoder = load(write, tokenizer, rows, max_length=8, truncation="right")
    assert ragged.lengths(batch["input_ids"]).tolist() == [8, 6]
    assert trained_texts(tokenizer, batch) == ["cde", "b<|im_end|>"]
    assert encoder.num_truncated == 1


def test_pairs_are_two_rows_and_common_messages_are_their_prompt(write):
    tokenizer = chat_tokenizer(PIECES)
    shared = [user("a"), reply("b"), user("c")]
    rows = [
        {"chosen": [*shared, reply("d")], "rejected": [*shared, reply("e"), user("f"), reply("g")]},
        {"prompt": "ab", "chosen": "c", "rejected": "d"},
    ]
    batch, _ = load(write, tokenizer, rows, "pair")
    expected = ["d<|im_end|>", "e<|im_end|>····g<|im_end|>", "c<|im_end|>", "d<|im_end|>"]
    assert trained_texts(tokenizer, batch) == expected


@pytest.mark.parametrize("template", [TEMPLATE, MARKED], ids=["rendered", "marked"])
def test_messages_after_the_last_reply_are_left_out(write, template):
    tokenizer = tokenizer_with(template)
    messages, more = [user("a"), reply("b"), user("c"), reply("d")], [user("e"), user("f")]
    short, _ = load(write, tokenizer, [{"messages": messages}])
    long, _ = load(write, tokenizer, [{"messages": [*messages, *more]}])
    assert ragged.values(long["input_ids"]).tolist() == ragged.values(short["input_ids"]).tolist()
    assert ragged.values(long["response_mask"]).tolist() == ragged.values(short["response_mask"]).tolist()


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"text": "x"}, r"expected the column 'messages' \(data\.messages_key\), or .* got 'text'"),
        ({"messages": []}, "expected a non-empty list of messages"),
        ({"messages": [user("a")]}, "at least one message with the role assistant, got the roles user"),
        ({"messages": [{"role": "judge", "content": "a"}]}, r"messages\[0\]: expected an object with a role of system"),
        ({"messages": [user("a"), reply(" ")]}, r"messages\[1\]: expected an assistant message with content"),
        ({"prompt": [user("a")], "response": [user("c"), reply("b")]}, "must start and end with a reply"),
        (
            {"messages": '[{"role": "user"}]'},
            r"list of messages, got '\[\{\"role\": .*; if the text is JSON, store the list",
        ),
        (
            {"messages": None, "prompt": "a"},
            r"or the columns 'prompt' and 'response', got 'messages' \(null\), 'prompt'",
        ),
        (
            {"messages": [user("a"), {"role": "assistant", "value": "b"}]},
            r"\[1\]: expected an assistant message with content .* with the keys role, value, content; write its text",
        ),
        (
            {"messages": [reply("b"), user("a"), reply("b")]},
            "expected another message before the first reply",
        ),
        (
            {"messages": [user("a"), reply("b", weight=0), user("c"), reply("d", weight=1)]},
            r"\[1\]: weight=0 is not",
        ),
        ({"messages": [user("a"), reply("b")], "tools": "x"}, "expected `tools` as a list"),
        ({"messages": [user("a"), reply("b" * 40)]}, r"at most data\.max_length=32 tokens, got 45; .*truncation"),
        ({"prompt": 3, "response": "b"}, "expected `prompt` as a string or a list of messages, got 3"),
        ({"prompt": "a", "response": [reply("b")]}, "expected a response as a string or, if the prompt is a list"),
    ],
)
def test_invalid_row_is_refused_with_file_and_number(write, row, message):
    with pytest.raises(DataError, match=rf"rows\.jsonl, row 2: .*{message}"):
        load(write, chat_tokenizer(PIECES), [{"prompt": "a", "response": "b"}, row], max_length=32)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"messages": []}, "DPO expects the columns 'chosen' and 'rejected', got 'messages'"),
        ({"prompt": "a", "chosen": "b", "rejected": "b"}, "chosen and rejected are equal"),
        (
            {"prompt": [user("a")], "chosen": [reply("b")], "rejected": [reply("b", name="c")]},
            "chosen and rejected have equal tokens",
        ),
        ({"chosen": [user("a"), reply("b")], "rejected": [user("c"), reply("b")]}, "2 and 2 messages the first 0 are"),
        (
            {"chosen": [user("a"), reply("b")], "rejected": [user("a"), reply("b"), user("c"), reply("d")]},
            "begin with equal messages and end with different replies, but of their 2 and 4 messages the first 2 are",
        ),
    ],
)
def test_invalid_pair_is_refused_with_file_and_number(write, row, message):
    with pytest.raises(DataError, match=rf"rows\.jsonl, row 1: .*{message}"):
        load(write, chat_tokenizer(PIECES), [row], "pair")


def test_truncation_that_leaves_no_trained_token_is_refused(write):
    with pytest.raises(DataError, match=r"row 1: expected a token of a reply among the first data\.max_length=4"):
        load(
            write, chat_tokenizer(PIECES), [{"messages": [user("abcde"), reply("f")]}], max_length=4, truncation="right"
        )


def test_template_that_rewrites_earlier_replies_is_refused(write):
    messages = [user("a"), reply("b"), user("c"), reply("d")]
    with pytest.raises(DataError, match=r"row 1: the chat template changes earlier replies .* messages\[3\]"):
        load(write, tokenizer_with(REWRITING), [{"messages": messages}])


def test_messages_require_a_chat_template(write):
    with pytest.raises(DataError, match=r"row 1: messages require a chat template, and the tokenizer of model\.path"):
        load(write, piece_tokenizer("ab"), [{"messages": [user("a"), reply("b")]}])
