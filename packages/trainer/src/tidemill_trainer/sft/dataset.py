"""The data set of supervised fine-tuning: rows of files as token sequences, with the tokens that are trained on."""

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from tidemill_dataproto import DataProto
from tidemill_rollout import ChatTemplate, demonstration
from tidemill_rollout.messages import Message, clean_message
from transformers import PreTrainedTokenizerBase

from tidemill_trainer.data import DataError, encode_prompt, read_rows
from tidemill_trainer.sft.config import SFTDataConfig
from tidemill_trainer.sft.example import Example, end_of_reply, to_batch

_FIX = 'raise it, or set data.truncation="right"'


class Encoder:
    """Convert rows of data files to examples.

    Args:
        tokenizer: tokenizer of the model.
        config: names of columns and limits.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, config: SFTDataConfig) -> None:
        self._tokenizer = tokenizer
        self._template = ChatTemplate(tokenizer)
        self._config = config
        self.num_truncated = 0

    def example(self, row: Mapping[str, Any]) -> list[Example]:
        """Return the example of a row with messages, or with a prompt and a response.

        Raises:
            ValueError: the row is malformed, the chat template rejects it or changes earlier replies, or it is too
                long.
        """
        if row.get(self._config.messages_key) is not None:
            return [self._fitted(self._of_messages(row[self._config.messages_key], row.get("tools")))]
        if row.get("prompt") is None or row.get("response") is None:
            raise ValueError(
                f"expected the column {self._config.messages_key!r} (data.messages_key), or the columns 'prompt' and "
                f"'response', got {_columns(row)}"
            )
        return [self._fitted(self._of_response(row, row["response"]))]

    def pair(self, row: Mapping[str, Any]) -> list[Example]:
        """Return the chosen and the rejected example of a row with preferences; see `example`.

        Messages that both have in common are their prompt, which is not trained on.
        """
        chosen, rejected = row.get("chosen"), row.get("rejected")
        if chosen is None or rejected is None:
            raise ValueError(
                f"DPO expects the columns 'chosen' and 'rejected', got {_columns(row)}; add them, or remove the "
                "section dpo"
            )
        if chosen == rejected:
            raise ValueError("expected two different responses, but chosen and rejected are equal; remove the row")
        pair = self._pair(row, chosen, rejected)
        if pair[0] == pair[1]:
            raise ValueError(
                "expected two different responses, but chosen and rejected have equal tokens, after the chat template "
                "and data.truncation; remove the row, or raise data.max_length"
            )
        return pair

    def _pair(self, row: Mapping[str, Any], chosen: Any, rejected: Any) -> list[Example]:
        if row.get("prompt") is not None:
            return [self._fitted(self._of_response(row, response)) for response in (chosen, rejected)]
        pair = [_checked_messages(messages) for messages in (chosen, rejected)]
        common = next(
            (number for number, both in enumerate(zip(*pair, strict=False)) if both[0] != both[1]),
            min(map(len, pair)),
        )
        if not 0 < common < min(map(len, pair)):
            raise ValueError(
                f"expected chosen and rejected to begin with equal messages and end with different replies, but of "
                f"their {len(pair[0])} and {len(pair[1])} messages the first {common} are equal; correct the row, or "
                "give the prompt in a column of its own"
            )
        return [
            self._fitted(self._of_reply(messages[:common], messages[common:], row.get("tools"))) for messages in pair
        ]

    def _of_messages(self, messages: Any, tools: Any) -> Example:
        cleaned = _checked_messages(messages)
        replies = [number for number, message in enumerate(cleaned) if message["role"] == "assistant"]
        if not replies:
            roles = ", ".join(message["role"] for message in cleaned)
            raise ValueError(f"expected at least one message with the role assistant, got the roles {roles}")
        self._check_template()
        if self._template.marks_replies:
            cleaned = _until_last_reply(cleaned)
            _check_replies(cleaned)
            return Example.of_mask(*self._template.encode_marked(cleaned, _checked_tools(tools)))
        if replies[0] == 0:
            raise ValueError("expected another message before the first reply; add it, or remove the reply")
        return self._of_reply(cleaned[: replies[0]], cleaned[replies[0] :], tools)

    def _of_response(self, row: Mapping[str, Any], response: Any) -> Example:
        """Return the example of a text or of messages that continue the `prompt` of a row."""
        if isinstance(response, list) and isinstance(row["prompt"], list):
            prompt = _checked_messages(row["prompt"])
            return self._of_reply(prompt, _checked_messages(response), row.get("tools"))
        if not isinstance(response, str):
            raise ValueError(
                "expected a response as a string or, if the prompt is a list of messages, as a list of messages, got "
                f"{str(response)[:80]}"
            )
        end = None
        if isinstance(row["prompt"], list):
            self._check_template()
            end = self._end_of_reply
        return Example.of_text(encode_prompt(row, self._template), response, self._template, end=end)

    def _of_reply(self, prompt: Sequence[Message], response: Sequence[Message], tools: Any) -> Example:
        self._check_template()
        response = _until_last_reply(response)
        _check_replies(response, len(prompt))
        return Example.of_trajectory(demonstration(self._template, prompt, response, _checked_tools(tools)))

    @cached_property
    def _end_of_reply(self) -> int:
        return end_of_reply(self._tokenizer)

    def _check_template(self) -> None:
        if self._template.source is None:
            raise ValueError(
                "messages require a chat template, and the tokenizer of model.path has none; add chat_template.jinja "
                "to its folder, or use the columns 'prompt' and 'response' with texts"
            )

    def _fitted(self, example: Example) -> Example:
        limit = self._config.max_length
        if len(example.token_ids) > limit:
            if self._config.truncation == "error":
                raise ValueError(
                    f"an example must have at most data.max_length={limit} tokens, got {len(example.token_ids)}; {_FIX}"
                )
            self.num_truncated += 1
            example = example.truncated(limit)
        if not any(example.response_mask):
            raise ValueError(
                f"expected a token of a reply among the first data.max_length={limit} tokens, got none; raise it, or "
                "remove the row"
            )
        return example


def load_examples(files: Sequence[str], encode: Callable[[Mapping[str, Any]], list[Example]]) -> DataProto:
    """Read and encode all rows of `files`.

    Args:
        files: paths of `.jsonl` or `.parquet` files.
        encode: `Encoder.example` or `Encoder.pair`.

    Returns:
        The ragged columns of `to_batch`. With pairs, row 2i is the chosen example of pair i, and row 2i + 1 the
        rejected one.

    Raises:
        DataError: a file is missing or cannot be read, a row is invalid, or there are no rows; the message names file
            and row.
    """
    examples: list[Example] = []
    for file in files:
        for number, row in enumerate(read_rows(Path(file)), start=1):
            try:
                examples += encode(row)
            except ValueError as error:
                raise DataError(f"{file}, row {number}: {error}") from error
    if not examples:
        raise DataError(f"expected rows in {', '.join(files) or 'data.train_files, which is empty'}, got none")
    return to_batch(examples)


def _columns(row: Mapping[str, Any]) -> str:
    """Return the names of the columns of a row."""
    names = [f"{name!r}{' (null)' if value is None else ''}" for name, value in row.items()]
    return ", ".join(names) or "no column"


def _checked_messages(messages: Any) -> list[Message]:
    if not isinstance(messages, list) or not messages:
        remedy = "; if the text is JSON, store the list itself" if isinstance(messages, str) else ""
        raise ValueError(f"expected a non-empty list of messages, got {repr(messages)[:80]}{remedy}")
    return [clean_message(message, number) for number, message in enumerate(messages)]


def _until_last_reply(messages: Sequence[Message]) -> Sequence[Message]:
    """Return messages up to the last reply, if there is one. Those after it would not be trained on."""
    replies = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
    return messages[: replies[-1] + 1] if replies else messages


def _check_replies(messages: Sequence[Message], first: int = 0) -> None:
    for number, message in enumerate(messages, start=first):
        if message["role"] == "assistant" and message.get("weight", 1) != 1:
            raise ValueError(
                f"messages[{number}]: weight={message['weight']} is not supported, every reply is trained on; end the "
                "conversation before this message, or put it into the `prompt` of a row with a `response`"
            )
        content = (message["content"], message.get("reasoning_content") or "")
        if message["role"] == "assistant" and not any(map(str.strip, content)) and not message.get("tool_calls"):
            raise ValueError(
                f"messages[{number}]: expected an assistant message with content or tool calls, got an empty one with "
                f"the keys {', '.join(message)}; write its text to `content`, or remove the row"
            )


def _checked_tools(tools: Any) -> Sequence[Any] | None:
    if tools is not None and not isinstance(tools, list):
        raise ValueError(f"expected `tools` as a list of descriptions in OpenAI's format, got {str(tools)[:80]}")
    return tools
