"""OpenAI's chat completions format: request bodies in; response bodies, chunks and errors out."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from tidemill_rollout.errors import short
from tidemill_rollout.messages import Message
from tidemill_rollout.session import Reply

_MAX_REPLIES = 128  # as OpenAI
_NUMBERS = ("temperature", "top_p", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty")
_INTEGERS = ("top_k", "seed", "n", "max_tokens", "max_completion_tokens", "top_logprobs")
_BOOLEANS = ("stream", "logprobs", "parallel_tool_calls")
_OBJECTS = ("logit_bias", "stream_options", "response_format")
_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty")
# Values that clients send by default and that change nothing.
_NEUTRAL = {"min_p": 0, "frequency_penalty": 0, "presence_penalty": 0, "repetition_penalty": 1, "logit_bias": {}}
# Fields that do not change the reply.
_IGNORED = {"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"}
_READ = {"model", "messages", "tools", "tool_choice", "stop", *_NUMBERS, *_INTEGERS, *_BOOLEANS, *_OBJECTS}
# Values of fields that are accepted for what the endpoint does anyway.
_ONLY: dict[str, tuple[Any, ...]] = {
    "response_format": ({"type": "text"},),
    "parallel_tool_calls": (True,),
    "tool_choice": ("auto", "none"),
    "top_logprobs": (0,),
    "modalities": (["text"],),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatRequest:
    """The body of a request to `/v1/chat/completions`.

    Attributes:
        messages: the conversation; the session checks it.
        tools: tools; None without tools and with `tool_choice` "none".
        num_replies: number of replies, `n`.
        is_stream: whether the reply is sent as events.
        has_usage: whether the events include the usage.
        has_log_probs: whether the reply includes the log-probs of its tokens.
        model: name of the model, which is returned as it is.
        sampling: sampling parameters for `Session.generate`.
    """

    messages: list[Any]
    tools: list[Any] | None
    num_replies: int
    is_stream: bool
    has_usage: bool
    has_log_probs: bool
    model: str
    sampling: Mapping[str, Any]

    def sampling_of(self, number: int) -> dict[str, Any]:
        """Return the sampling parameters of one of the replies; replies to a request with a seed differ by it."""
        seed = self.sampling.get("seed")
        return dict(self.sampling) if seed is None else {**self.sampling, "seed": seed + number}


def parse_chat_request(body: Any) -> ChatRequest:
    """Return the request for a parsed body.

    Raises:
        ValueError: a field is missing, has a wrong type, or is not supported.
    """
    if not isinstance(body, dict):
        raise ValueError(f"the body must be a JSON object, got {short(body)}")
    body = {name: value for name, value in body.items() if value is not None and name not in _IGNORED}
    _check_types(body)
    for name, value in body.items():
        if name in _ONLY and value not in _ONLY[name]:
            supported = " and ".join(json.dumps(each) for each in _ONLY[name])
            raise ValueError(f"{name}={short(value)} is not supported, only {supported}; remove it from the request")
        if name not in _READ and name not in _ONLY:
            raise ValueError(f"the field {name!r} is not supported; remove it from the request")
    sampling = {name: body[name] for name in (*_SAMPLING, "logit_bias", "seed", "stop") if name in body}
    sampling = {name: value for name, value in sampling.items() if _NEUTRAL.get(name) != value}
    if (max_tokens := body.get("max_completion_tokens", body.get("max_tokens"))) is not None:
        sampling["max_tokens"] = max_tokens
    return ChatRequest(
        messages=body["messages"],
        tools=_tools(body.get("tools")) if body.get("tool_choice") != "none" else None,
        num_replies=body.get("n", 1),
        is_stream=body.get("stream", False),
        has_usage=body.get("stream_options", {}).get("include_usage") is True,
        has_log_probs=body.get("logprobs", False),
        model=body.get("model", "policy"),
        sampling=sampling,
    )


def _check_types(body: Mapping[str, Any]) -> None:
    if not isinstance(body.get("messages"), list):
        raise ValueError(f"messages must be a list of messages, got {short(body.get('messages'))}")
    for names, kind, text in (
        (("model",), str, "a string"),
        (_NUMBERS, (int, float), "a number"),
        (_INTEGERS, int, "an integer"),
        (_BOOLEANS, bool, "true or false"),
        (_OBJECTS, dict, "an object"),
    ):
        for name in names:
            value = body.get(name)
            is_number = isinstance(value, bool) and kind is not bool
            if value is not None and (is_number or not isinstance(value, kind)):
                raise ValueError(f"{name} must be {text}, got {short(value)}")
    for name in ("n", "max_tokens", "max_completion_tokens"):
        if body.get(name, 1) < 1:
            raise ValueError(f"{name} must be >= 1, got {body[name]}")
    if body.get("n", 1) > _MAX_REPLIES:
        raise ValueError(f"n must be <= {_MAX_REPLIES}, got {body['n']}; send several requests")
    bias = body.get("logit_bias", {})
    if not all(isinstance(value, int | float) for value in bias.values()):
        raise ValueError(f"the values of logit_bias must be numbers, got {short(bias)}")
    stop = body.get("stop", [])
    if not all(isinstance(each, str) and each for each in (stop if isinstance(stop, list) else [stop])):
        raise ValueError(f"stop must be a string or a list of strings that are not empty, got {short(stop)}")


def _tools(tools: Any) -> list[Any] | None:
    if not tools:
        return None
    for number, tool in enumerate(tools if isinstance(tools, list) else [tools]):
        function = tool.get("function") if isinstance(tool, dict) and tool.get("type") == "function" else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            expected = '{"type": "function", "function": {"name": ..., "parameters": ...}}'
            raise ValueError(f"tools[{number}]: expected {expected}, got {short(tool)}")
    return tools


def completion(
    request: ChatRequest, replies: Sequence[Reply], tokenizer: PreTrainedTokenizerBase, *, id: str, created: int
) -> dict[str, Any]:
    """Return the response body with all replies.

    Args:
        request: the request.
        replies: its replies.
        tokenizer: tokenizer for the texts of tokens with log-probs.
        id: name of the response.
        created: Unix time in seconds.
    """
    choices = [
        {
            "index": number,
            "message": _message(reply),
            "logprobs": _log_probs(reply, tokenizer) if request.has_log_probs else None,
            "finish_reason": reply.finish_reason,
        }
        for number, reply in enumerate(replies)
    ]
    return _object("chat.completion", request, id, created) | {"choices": choices, "usage": _usage(replies)}


def opening_chunks(request: ChatRequest, *, id: str, created: int) -> Iterator[dict[str, Any]]:
    """Return the chunks that start the choices of a stream; see `completion`."""
    for number in range(request.num_replies):
        yield _chunk(request, id, created, number, {"role": "assistant", "content": ""})


def reply_chunks(
    request: ChatRequest, replies: Sequence[Reply], tokenizer: PreTrainedTokenizerBase, *, id: str, created: int
) -> Iterator[dict[str, Any]]:
    """Return the chunks of a stream that follow the opening ones; see `completion`."""
    for number, reply in enumerate(replies):
        deltas = [{name: reply.message[name]} for name in ("reasoning_content", "content") if reply.message.get(name)]
        deltas += [{"tool_calls": [{"index": index, **call}]} for index, call in enumerate(reply.tool_calls)]
        log_probs = _log_probs(reply, tokenizer) if request.has_log_probs else None
        for position, delta in enumerate([*deltas, {}]):
            yield _chunk(
                request,
                id,
                created,
                number,
                delta,
                log_probs=log_probs if position == 0 else None,
                finish_reason=reply.finish_reason if position == len(deltas) else None,
            )
    if request.has_usage:
        yield _object("chat.completion.chunk", request, id, created) | {"choices": [], "usage": _usage(replies)}


def error_body(message: str, code: str, kind: str = "invalid_request_error") -> dict[str, Any]:
    """Return the body of a response for an error."""
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}


def _object(kind: str, request: ChatRequest, id: str, created: int) -> dict[str, Any]:
    return {"id": id, "object": kind, "created": created, "model": request.model}


def _chunk(
    request: ChatRequest,
    id: str,
    created: int,
    number: int,
    delta: dict[str, Any],
    *,
    log_probs: dict[str, Any] | None = None,
    finish_reason: str | None = None,
) -> dict[str, Any]:
    choice = {"index": number, "delta": delta, "logprobs": log_probs, "finish_reason": finish_reason}
    return _object("chat.completion.chunk", request, id, created) | {"choices": [choice]}


def _message(reply: Reply) -> Message:
    message = dict(reply.message)
    if reply.tool_calls and not message["content"]:
        message["content"] = None
    return message


def _usage(replies: Sequence[Reply]) -> dict[str, int]:
    sampled = sum(len(reply.token_ids) for reply in replies)
    prompt = replies[0].num_prompt_tokens
    return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}


def _log_probs(reply: Reply, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """Return the log-probs of all sampled tokens, including the one that ended the reply."""
    content = []
    for token, log_prob in zip(reply.token_ids, reply.log_probs, strict=True):
        text: str = tokenizer.decode([token])  # type: ignore[assignment]
        piece: str = tokenizer.convert_ids_to_tokens(token)  # type: ignore[assignment]
        is_part = "\ufffd" in text and all(character in _BYTES for character in piece)  # part of a character
        data = bytes(_BYTES[character] for character in piece) if is_part else text.encode()
        content.append({"token": text, "bytes": list(data), "logprob": log_prob, "top_logprobs": []})
    return {"content": content, "refusal": None}


def _byte_alphabet() -> dict[str, int]:
    """Return the byte for each character of byte-level BPE vocabularies (GPT-2, Qwen, Llama 3)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}


_BYTES = _byte_alphabet()
