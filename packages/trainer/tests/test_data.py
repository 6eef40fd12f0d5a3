import json
from collections import Counter
from decimal import Decimal

import pyarrow
import pyarrow.parquet
import pytest
from tidemill_dataproto import ragged
from tidemill_rollout import ChatTemplate
from tidemill_rollout.messages import check_messages
from tidemill_trainer.config import DataConfig
from tidemill_trainer.data import DataError, PromptLoader, load_prompts, read_rows, to_problems, with_responses
from tidemill_trainer.demo.chat import chat_tokenizer
from tidemill_trainer.demo.shop import PIECES, shop_rows
from tidemill_trainer.sft.config import SFTDataConfig
from tidemill_trainer.sft.dataset import Encoder, load_examples


def _write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_jsonl_and_parquet_give_equal_rows(tmp_path, tokenizer):
    rows = [
        {"prompt": "1+2=", "ground_truth": "3", "data_source": "sums", "extra_info": {"level": 1}, "response": "3"},
        {"prompt": "10+2=", "ground_truth": "12", "data_source": "sums", "extra_info": {"level": 2}, "response": "12"},
    ]
    jsonl = _write(tmp_path / "a.jsonl", rows)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    for file in (jsonl, str(tmp_path / "a.parquet")):
        data, skipped = load_prompts([file], tokenizer, DataConfig())
        assert skipped == 0
        assert [tokenizer.decode(row) for row in data["prompts"].unbind()] == ["1+2=", "10+2="]
        assert data.non_tensor_batch["ground_truth"].tolist() == ["3", "12"]
        assert data.non_tensor_batch["extra_info"].tolist() == [{"level": 1}, {"level": 2}]


@pytest.mark.parametrize(
    "ground_truth", [3, "3", 2.5, True, [1, 2], [], ["a"], [[1], [2, 3]], {"x": 1}, Decimal("1.5"), None]
)
def test_parquet_values_reach_the_reward_function_as_python_objects(tmp_path, tokenizer, ground_truth):
    rows = [{"prompt": "1+2=", "ground_truth": ground_truth}, {"prompt": "1+3=", "ground_truth": ground_truth}]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    data, _ = load_prompts([str(tmp_path / "a.parquet")], tokenizer, DataConfig())
    actual = data.non_tensor_batch["ground_truth"].tolist()
    assert actual == [ground_truth, ground_truth]
    assert {type(value) for value in actual} == {type(ground_truth)}


def _row_with_calls(**arguments):
    function = {"name": "scan", "arguments": arguments}
    return {
        "prompt": [
            {"role": "user", "content": "fig"},
            {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]},
            {"role": "tool", "content": "1"},
        ],
        "response": [
            {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]},
            {"role": "tool", "content": "1"},
            {"role": "assistant", "content": "2"},
        ],
        "extra_info": {"prices": [arguments]},
    }


def test_parquet_fields_that_only_other_rows_have_are_not_read_as_null(tmp_path):
    tokenizer = chat_tokenizer(PIECES)
    rows = [_row_with_calls(item="lemon"), _row_with_calls(x={"y": 1})]
    jsonl = _write(tmp_path / "a.jsonl", rows)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    expected, _ = load_prompts([jsonl], tokenizer, DataConfig())
    actual, _ = load_prompts([str(tmp_path / "a.parquet")], tokenizer, DataConfig())
    assert '"arguments": {"item": "lemon"}' in tokenizer.decode(actual["prompts"][0])
    for name in ("prompt", "extra_info"):
        assert actual.non_tensor_batch[name].tolist() == [row[name] for row in rows]
    trained = [with_responses(data, tokenizer)["input_ids"].unbind() for data in (actual, expected)]
    for left, right in zip(*trained, strict=True):
        assert left.tolist() == right.tolist()


def test_parquet_columns_and_list_items_that_are_null_stay_none(tmp_path):
    rows = [{"prompt": "1", "extra_info": None, "ids": [1, None]}, {"prompt": "2", "extra_info": {"x": 1}, "ids": None}]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    assert list(read_rows(tmp_path / "a.parquet")) == rows


def test_tools_of_a_row_are_tools_of_its_problem(tmp_path):
    rows = [{"prompt": [{"role": "user", "content": "fig"}]} for _ in range(2)]
    rows[0]["tools"] = shop_rows(1, 0, seed=0, hasty_share=0.0)[0][0]["tools"]
    data, _ = load_prompts([_write(tmp_path / "t.jsonl", rows)], chat_tokenizer(PIECES), DataConfig())
    assert [problem.tools for problem in to_problems(data, "1")] == [rows[0]["tools"], None]
    tokenizer = chat_tokenizer(PIECES)
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    with pytest.raises(DataError, match=r"t\.jsonl.* 1: .*the chat template ignores tools, and there are 1"):
        load_prompts([_write(tmp_path / "t.jsonl", rows)], tokenizer, DataConfig())


def test_verl_ground_truth_is_read(tmp_path, tokenizer):
    row = {"prompt": "1+1=", "data_source": "openai/gsm8k", "reward_model": {"style": "rule", "ground_truth": "2"}}
    data, _ = load_prompts([_write(tmp_path / "v.jsonl", [row])], tokenizer, DataConfig())
    assert data.non_tensor_batch["ground_truth"].tolist() == ["2"]
    assert data.non_tensor_batch["data_source"].tolist() == ["openai/gsm8k"]


def test_prompt_has_the_tokens_that_an_episode_gives_it(tmp_path):
    """Text in parts, a role that the template may not know, and arguments as JSON text."""
    prompt = [
        {"role": "developer", "content": "fig"},
        {"role": "user", "content": [{"type": "text", "text": "lemon"}]},
        {"role": "assistant", "tool_calls": [{"function": {"name": "price", "arguments": '{"item": "fig"}'}}]},
        {"role": "tool", "content": "1"},
    ]
    tokenizer = chat_tokenizer(PIECES)
    data, _ = load_prompts([_write(tmp_path / "p.jsonl", [{"prompt": prompt}])], tokenizer, DataConfig())
    template = ChatTemplate(tokenizer)
    expected = template.render(check_messages(prompt), None, add_generation_prompt=True)
    assert tokenizer.decode(data["prompts"][0]) == expected
    assert "lemon" in expected
    assert '"arguments": {"item": "fig"}' in expected


def test_null_ground_truth_does_not_hide_the_one_of_verl(tmp_path, tokenizer):
    row = {"prompt": "1+1=", "ground_truth": None, "reward_model": {"ground_truth": "2"}}
    data, _ = load_prompts([_write(tmp_path / "v.jsonl", [row])], tokenizer, DataConfig())
    assert data.non_tensor_batch["ground_truth"].tolist() == ["2"]


def test_ground_truths_that_are_lists_stay_lists(tmp_path, tokenizer):
    rows = [{"prompt": "1=", "ground_truth": [1, 2]}, {"prompt": "2=", "ground_truth": [3, 4]}]
    data, _ = load_prompts([_write(tmp_path / "l.jsonl", rows)], tokenizer, DataConfig())
    assert data.non_tensor_batch["ground_truth"].shape == (2,)
    assert data.non_tensor_batch["ground_truth"][1] == [3, 4]


def test_overlong_prompts_are_rejected_or_skipped(tmp_path, tokenizer):
    file = _write(tmp_path / "p.jsonl", [{"prompt": "1+1="}, {"prompt": "1000+1000="}])
    with pytest.raises(
        DataError, match=r"p\.jsonl, row 2: the prompt must have at most .*max_prompt_length=8 tokens, got 10"
    ):
        load_prompts([file], tokenizer, DataConfig(max_prompt_length=8))
    data, skipped = load_prompts([file], tokenizer, DataConfig(max_prompt_length=8, overlong_prompts="skip"))
    assert (len(data), skipped) == (1, 1)
    with pytest.raises(DataError, match=r"expected problems in .*p\.jsonl, got none \(2 have a prompt longer than 2"):
        load_prompts([file], tokenizer, DataConfig(max_prompt_length=2, overlong_prompts="skip"))


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.jsonl", '{"prompt": "1"}\n{"prompt"\n', r"a\.jsonl, row 2: expected JSON in UTF-8"),
        ("a.jsonl", "[1]\n", r"a\.jsonl, row 1: expected a JSON object, got \[1\]"),
        ("a.jsonl", "{}\n", r"a\.jsonl, row 1: expected `prompt` as a string"),
        ("a.jsonl", '{"question": "?"}\n', r"list of messages, got no such key among \['question'\]"),
        (
            "a.jsonl",
            '{"prompt": " [{\\"role\\": 1}]"}\n',
            r"got messages that are written as a text, ' \[{.*store the list",
        ),
        ("a.jsonl", """{"prompt": "[{'content': 'a'}]"}\n""", "got messages that are written as a text"),
        ("a.jsonl", '{"prompt": ""}\n', r"a\.jsonl, row 1: expected a `prompt` with at least one token, got ''"),
        ("a.csv", "x\n", r"expected a file name that ends in \.jsonl or \.parquet, got 'a\.csv'"),
        ("a.jsonl", "", r"expected problems in .*a\.jsonl, got none"),
        ("a.jsonl", '{"prompt": "1"}\n{"prompt": "é"}\n', r"row 2: expected JSON in UTF-8: .*can't decode byte 0xe9"),
        ("a.jsonl", '"\\ud800"\n', r"a\.jsonl, row 1: expected a JSON object, got '\\ud800'"),
        (
            "a.jsonl",
            '{"prompt": "1"}\n{"prompt": "12+13=\\ud800"}\n',
            r"a\.jsonl, row 2: column 'prompt' has half of a surrogate pair, '\\ud800', which UTF-8 cannot represent",
        ),
        (
            "a.jsonl",
            '{"prompt": [{"role": "user", "content": "\\ud800"}]}\n',
            r"a\.jsonl, row 1: column 'prompt' has half of a surrogate pair, '\\ud800'",
        ),
        (
            "a.jsonl",
            '{"prompt": "1", "\\udfff": 1}\n',
            r"a\.jsonl, row 1: column '\\udfff' has half of a surrogate pair",
        ),
        (
            "a.jsonl",
            '{"prompt": "1"}\n{"prompt": "1", "ground_truth": -' + "1" * 5000 + "}\n",
            r"a\.jsonl, row 2: expected integers of at most 4300 digits, got one of 5000; write it as a string",
        ),
        (
            "a.jsonl",
            '{"prompt": "1", "extra_info": ' + "[" * 100_000 + "]" * 100_000 + "}\n",
            r"a\.jsonl, row 1: lists and objects are nested too deeply; flatten them, or store them as JSON text",
        ),
        (
            "a.jsonl",
            '{"prompt": "1", "response": 2}\n',
            r"a\.jsonl, row 1: expected `response` as a string or, .*, got 2",
        ),
        (
            "a.jsonl",
            '{"prompt": [{"role": "user", "content": "1"}]}\n',
            r"a\.jsonl, row 1: messages require a chat template, .* has none; add chat_template\.jinja",
        ),
        ("a.parquet", "PAR1 and no more", r"a\.parquet cannot be read as parquet: "),
    ],
)
def test_invalid_file_is_rejected_with_file_and_row(tmp_path, tokenizer, name, text, message):
    (tmp_path / name).write_text(text, encoding="latin-1")
    with pytest.raises(DataError, match=message):
        load_prompts([str(tmp_path / name)], tokenizer, DataConfig())


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32"])
def test_other_encoding_than_utf_8_is_rejected_with_file_and_row(tmp_path, tokenizer, encoding):
    (tmp_path / "a.jsonl").write_text('{"prompt": "1"}\n{"prompt": "2"}\n', encoding=encoding)
    message = r"a\.jsonl, row 1: expected JSON in UTF-8, got null bytes, .*UTF-16.*; convert the file to UTF-8"
    with pytest.raises(DataError, match=message):
        load_prompts([str(tmp_path / "a.jsonl")], tokenizer, DataConfig())


def test_jsonl_with_byte_order_mark_and_surrogate_pair_is_read(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"prompt": "\\ud83d\\ude00"}\n', encoding="utf-8-sig")
    assert list(read_rows(tmp_path / "a.jsonl")) == [{"prompt": "\U0001f600"}]


def test_blank_lines_are_skipped_and_not_numbered(tmp_path, tokenizer):
    (tmp_path / "a.jsonl").write_text('\n{"prompt": "1"}\n \r\n{"prompt": 2}\n\n')
    assert list(read_rows(tmp_path / "a.jsonl")) == [{"prompt": "1"}, {"prompt": 2}]
    with pytest.raises(DataError, match=r"a\.jsonl, row 2: expected `prompt` as a string"):
        load_prompts([str(tmp_path / "a.jsonl")], tokenizer, DataConfig())


def test_row_of_sft_that_cannot_be_tokenized_is_rejected_with_file_and_row(tmp_path, tokenizer):
    file = _write(tmp_path / "s.jsonl", [{"prompt": "1", "response": "2"}, {"prompt": "1", "response": "\ud800"}])
    with pytest.raises(DataError, match=r"s\.jsonl, row 2: column 'response' has half of a surrogate pair"):
        load_examples([file], Encoder(tokenizer, SFTDataConfig()).example)


@pytest.mark.parametrize("name", ["d", "d.jsonl", "d.parquet"])
def test_folder_instead_of_a_data_file_is_rejected_as_a_folder(tmp_path, tokenizer, name):
    (tmp_path / name).mkdir()
    message = rf"expected a \.jsonl or \.parquet file, but /.*/{name} is a folder; list its files in data\.train_files"
    with pytest.raises(DataError, match=message):
        load_prompts([str(tmp_path / name)], tokenizer, DataConfig())


def test_missing_file_and_empty_list_of_files_are_rejected(tokenizer):
    with pytest.raises(DataError, match=r"data file /.*/nowhere\.jsonl does not exist"):
        load_prompts(["nowhere.jsonl"], tokenizer, DataConfig())
    with pytest.raises(DataError, match=r"/\*\.jsonl does not exist; .*; patterns are not expanded, list the files"):
        load_prompts(["*.jsonl"], tokenizer, DataConfig())
    with pytest.raises(DataError, match=r"data\.train_files, which is empty"):
        load_prompts([], tokenizer, DataConfig())


def test_each_epoch_contains_every_problem_once(tmp_path, tokenizer):
    rows = [{"prompt": f"{n}="} for n in range(7)]
    data, _ = load_prompts([_write(tmp_path / "e.jsonl", rows)], tokenizer, DataConfig())
    loader = PromptLoader(data, batch_size=3, seed=5)
    drawn = [tokenizer.decode(row) for step in range(1, 8) for row in loader.batch(step)["prompts"].unbind()]
    epochs = [drawn[start : start + 7] for start in range(0, 21, 7)]
    assert all(Counter(epoch) == Counter(f"{n}=" for n in range(7)) for epoch in epochs)
    assert epochs[0] != epochs[1]
    # A batch depends on seed and step alone.
    again = PromptLoader(data, batch_size=3, seed=5).batch(4)
    assert [tokenizer.decode(row) for row in again["prompts"].unbind()] == drawn[9:12]
    other = PromptLoader(data, batch_size=7, seed=6).batch(1)
    assert [tokenizer.decode(row) for row in other["prompts"].unbind()] != epochs[0]
    problems = [problem for step in range(1, 4) for problem in loader.problems(3 * step - 3, 3, step)]
    assert [problem.prompt for problem in problems] == drawn[:9]
    assert [problem.ordinal for problem in problems] == list(range(9))
    assert len({problem.id for problem in problems}) == 9
    assert [f"{row}=" for row in loader.rows(3)] == drawn[6:9]


def test_warm_up_columns_are_prompt_response_and_end_token(tmp_path, tokenizer):
    file = _write(tmp_path / "r.jsonl", [{"prompt": "1+1=", "response": "2"}, {"prompt": "9+9=", "response": "18"}])
    data, _ = load_prompts([file], tokenizer, DataConfig())
    batch = with_responses(data, tokenizer)
    assert ragged.lengths(batch["responses"]).tolist() == [2, 3]
    assert [tokenizer.decode(row) for row in batch["input_ids"].unbind()] == ["1+1=2<eos>", "9+9=18<eos>"]
    file = _write(tmp_path / "n.jsonl", [{"prompt": "1+1="}])
    with pytest.raises(DataError, match="the warm-up requires a `response` in every row"):
        with_responses(load_prompts([file], tokenizer, DataConfig())[0], tokenizer)


def test_warm_up_on_a_text_after_messages_ends_as_the_template_ends_a_reply(tmp_path):
    tokenizer = chat_tokenizer(PIECES)
    tokenizer.add_special_tokens({"eos_token": "<|endoftext|>"})
    prompts = [[{"role": "user", "content": "ab"}], "ab"]
    file = _write(tmp_path / "t.jsonl", [{"prompt": prompt, "response": "c"} for prompt in prompts])
    batch = with_responses(load_prompts([file], tokenizer, DataConfig())[0], tokenizer)
    assert [tokenizer.decode(row) for row in batch["responses"].unbind()] == ["c<|im_end|>", "c<|endoftext|>"]


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_warm_up_on_messages_trains_on_the_replies_alone(tmp_path, suffix):
    tokenizer = chat_tokenizer(PIECES)
    template = ChatTemplate(tokenizer)
    rows = shop_rows(20, 0, seed=0, hasty_share=0.5)[0]
    file = str(tmp_path / f"shop.{suffix}")
    if suffix == "jsonl":
        _write(tmp_path / "shop.jsonl", rows)
    else:
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), file)
    batch = with_responses(load_prompts([file], tokenizer, DataConfig())[0], tokenizer)
    columns = [batch[name].unbind() for name in ("input_ids", "responses", "response_mask")]
    for row, ids, response, mask in zip(rows, *columns, strict=True):
        messages = [*row["prompt"], *row["response"]]
        assert tokenizer.decode(ids) == template.render(messages, row["tools"], add_generation_prompt=False)
        trained = tokenizer.decode(response[mask > 0])
        assert trained.count("<|im_end|>") == sum(message["role"] == "assistant" for message in messages)
        assert trained.count("<tool_call>") == sum("tool_calls" in message for message in messages)
        assert "<|im_start|>" not in trained


def test_demonstration_that_does_not_end_with_a_reply_is_rejected_with_file_and_row(tmp_path):
    row = {"prompt": [{"role": "user", "content": "fig"}], "response": [{"role": "tool", "content": "1"}]}
    with pytest.raises(DataError, match=r"d\.jsonl, row 1: .*must start and end with a reply .*\['tool'\]"):
        load_prompts([_write(tmp_path / "d.jsonl", [row])], chat_tokenizer(PIECES), DataConfig())
