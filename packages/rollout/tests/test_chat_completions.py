"""OpenAI's chat completions format without HTTP."""

import asyncio
from dataclasses import replace

import pytest
from tidemill_rollout.chat_completions import completion, opening_chunks, parse_chat_request, reply_chunks

MESSAGES = [{"role": "user", "content": "hello"}]
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}
NAMES = {"id": "chatcmpl-1", "created": 0}


def parse(**fields):
    return parse_chat_request({"model": "m", "messages": MESSAGES, **fields})


def reply(scripted, text, **sampling):
    return asyncio.run(scripted(text).session().generate(MESSAGES, **sampling))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"messages": None}, "messages must be a list of messages, got None"),
        ({"messages": "hello"}, "messages must be a list of messages, got 'hello'"),
        ({"n": 0}, "n must be >= 1, got 0"),
        ({"n": 129}, "n must be <= 128, got 129"),
        ({"n": True}, "n must be an integer, got True"),
        ({"max_tokens": 0}, "max_tokens must be >= 1, got 0"),
        ({"max_completion_tokens": "5"}, "max_completion_tokens must be an integer, got '5'"),
        ({"temperature": "hot"}, "temperature must be a number, got 'hot'"),
        ({"stream": 1}, "stream must be true or false, got 1"),
        ({"stream_options": []}, r"stream_options must be an object, got \[\]"),
        ({"stop": [""]}, "stop must be a string or a list of strings that are not empty"),
        ({"stop": [1]}, "stop must be a string or a list of strings"),
        ({"model": 3}, "model must be a string, got 3"),
        ({"tools": [{"name": "weather"}]}, r"tools\[0\]: expected .*, got {'name': 'weather'}"),
        ({"tools": "weather"}, r"tools\[0\]: expected .*, got 'weather'"),
        ({"response_format": {"type": "json_object"}}, 'response_format=.* is not supported, only {"type": "text"}'),
        ({"tool_choice": "required"}, 'tool_choice=\'required\' is not supported, only "auto" and "none"'),
        ({"tool_choice": {"type": "function", "function": {"name": "weather"}}}, "tool_choice=.* is not supported"),
        ({"parallel_tool_calls": False}, "parallel_tool_calls=False is not supported, only true"),
        ({"top_logprobs": 3}, "top_logprobs=3 is not supported, only 0"),
        ({"modalities": ["text", "audio"]}, "modalities=.* is not supported"),
        ({"best_of": 2}, "the field 'best_of' is not supported"),
        ({"audio": {"voice": "alloy"}}, "the field 'audio' is not supported"),
        ({"functions": [{"name": "weather"}]}, "the field 'functions' is not supported"),
    ],
)
def test_field_that_is_malformed_or_not_supported_is_refused_by_name(fields, message):
    with pytest.raises(ValueError, match=message):
        parse(**fields)


@pytest.mark.parametrize("body", [None, [], "text", 3])
def test_body_that_is_no_object_is_refused(body):
    with pytest.raises(ValueError, match="the body must be a JSON object"):
        parse_chat_request(body)


def test_sampling_is_passed_on_without_values_that_change_nothing():
    request = parse(
        temperature=1,
        top_p=0.9,
        top_k=5,
        seed=3,
        stop=["\n"],
        logit_bias={"5": 1},
        presence_penalty=0.5,
        frequency_penalty=0.0,
        repetition_penalty=1.0,
        min_p=0,
        max_completion_tokens=7,
        tool_choice="auto",
        response_format={"type": "text"},
        user="me",
        metadata={"a": "b"},
        n=None,
    )
    assert request.sampling == {
        "temperature": 1,
        "top_p": 0.9,
        "top_k": 5,
        "seed": 3,
        "stop": ["\n"],
        "logit_bias": {"5": 1},
        "presence_penalty": 0.5,
        "max_tokens": 7,
    }
    assert parse(max_tokens=5).sampling == {"max_tokens": 5}
    assert parse(logit_bias={}).sampling == {}


def test_replies_to_one_request_with_a_seed_have_different_seeds():
    request = parse(seed=3, n=2)
    assert [request.sampling_of(number)["seed"] for number in range(request.num_replies)] == [3, 4]
    assert "seed" not in parse(n=2).sampling_of(1)


def test_tool_choice_none_leaves_the_tools_out():
    assert parse(tools=[TOOL]).tools == [TOOL]
    assert parse(tools=[TOOL], tool_choice="none").tools is None
    assert parse(tools=[]).tools is None


def test_usage_counts_the_prompt_once_and_the_tokens_of_all_replies(scripted):
    replies = [reply(scripted, "the answer<|im_end|>"), reply(scripted, "hello<|im_end|>")]
    body = completion(parse(n=2), replies, scripted("").tokenizer, **NAMES)
    prompt, sampled = replies[0].num_prompt_tokens, sum(len(each.token_ids) for each in replies)
    assert body["usage"] == {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}
    assert [choice["message"]["content"] for choice in body["choices"]] == ["the answer", "hello"]
    assert (body["model"], body["id"], body["object"]) == ("m", "chatcmpl-1", "chat.completion")


def test_log_probs_have_the_exact_bytes_of_tokens_that_are_parts_of_characters(scripted, tokenizer):
    one = reply(scripted, "Zoë 😀 \ufffd<|im_end|>")
    (choice,) = completion(parse(logprobs=True), [one], tokenizer, **NAMES)["choices"]
    tokens = choice["logprobs"]["content"]
    assert b"".join(bytes(token["bytes"]) for token in tokens).decode() == "Zoë 😀 \ufffd<|im_end|>"
    assert [token["logprob"] for token in tokens] == list(one.log_probs)
    assert completion(parse(), [one], tokenizer, **NAMES)["choices"][0]["logprobs"] is None


def test_reasoning_is_returned_beside_the_content(scripted, tokenizer):
    one = reply(scripted, "forty-two<|im_end|>")
    one = replace(one, message={"role": "assistant", "reasoning_content": "hello", "content": "forty-two"})
    (choice,) = completion(parse(), [one], tokenizer, **NAMES)["choices"]
    assert choice["message"] == {"role": "assistant", "reasoning_content": "hello", "content": "forty-two"}
    deltas = [chunk["choices"][0]["delta"] for chunk in reply_chunks(parse(), [one], tokenizer, **NAMES)]
    assert deltas == [{"reasoning_content": "hello"}, {"content": "forty-two"}, {}]


def test_chunks_of_a_stream_contain_what_the_whole_response_contains(scripted, tokenizer):
    request = parse(n=2, stream=True, stream_options={"include_usage": True}, logprobs=True)
    replies = [reply(scripted, "the answer<|im_end|>"), reply(scripted, "cut off")]
    whole = completion(request, replies, tokenizer, **NAMES)
    *chunks, usage = [*opening_chunks(request, **NAMES), *reply_chunks(request, replies, tokenizer, **NAMES)]
    assert (usage["usage"], usage["choices"]) == (whole["usage"], [])
    for choice in whole["choices"]:
        own = [part for chunk in chunks for part in chunk["choices"] if part["index"] == choice["index"]]
        assert own[0]["delta"]["role"] == "assistant"
        assert "".join(part["delta"].get("content", "") for part in own) == choice["message"]["content"]
        assert [part["logprobs"] for part in own if part["logprobs"]] == [choice["logprobs"]]
        reasons = [part["finish_reason"] for part in own]
        assert reasons == [None] * (len(own) - 1) + [choice["finish_reason"]]
