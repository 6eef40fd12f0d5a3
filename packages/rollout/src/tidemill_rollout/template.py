"""A model's chat template: the text of a conversation, and the tokens that follow a sampled reply."""

import functools
import inspect
import re
from collections.abc import Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from tidemill_rollout.engine import Generation
from tidemill_rollout.errors import TemplateError
from tidemill_rollout.fork import Fork, fork
from tidemill_rollout.messages import Message, clean_message, for_template
from tidemill_rollout.template_variables import variables

_REASONING = re.compile(r"<think>.*?</think>\s*", re.DOTALL)
_EMPTY_REASONING = re.compile(r"<think>\s*</think>\s*")
_NUM_CACHED_PROMPTS = 32  # all samples of a group start with the same prompt
_OPEN_REASONING = re.compile(r"<think>\s*\Z")
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")

Fingerprint = tuple[int, int]
"""Length and hash of the text of a prompt without reasoning blocks that make no difference."""


class ChatTemplate:
    """Render conversations with the chat template of a tokenizer.

    Args:
        tokenizer: tokenizer of the model, with a chat template if messages are used.
        kwargs: additional variables of the template, such as `{"enable_thinking": False}`.
        keep_reasoning: what happens where the template removes the reasoning of earlier replies (Qwen3 does so when the
            next user message comes). False: follow the template, with a new token sequence for the shortened history.
            True: continue the tokens as they were sampled.

    Raises:
        TemplateError: the template does not use one of `kwargs`.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        kwargs: Mapping[str, Any] | None = None,
        keep_reasoning: bool = False,
    ) -> None:
        self.tokenizer = tokenizer
        self.vocab_size = len(tokenizer)  # takes tens of milliseconds for 150,000 tokens
        self._kwargs = dict(kwargs or {})
        self._keep_reasoning = keep_reasoning
        self._removable = _REASONING if keep_reasoning else _EMPTY_REASONING
        added = tokenizer.added_tokens_decoder.items()
        self._encode = functools.lru_cache(_NUM_CACHED_PROMPTS)(self._encode_uncached)
        self._special = {token.content: id for id, token in added if token.special and token.content}
        self._check_kwargs()

    @property
    def source(self) -> str | None:
        """Source text of the template for conversations with tools; None if the tokenizer has no template."""
        template: Any = self.tokenizer.chat_template
        if isinstance(template, Mapping):  # several templates by name
            return template.get("tool_use", template.get("default"))
        return template

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text that contains its special tokens; none is added, not even a BOS.

        Raises:
            ValueError: the text contains half of a surrogate pair, which UTF-8 cannot represent.
        """
        return list(self._encode(text))

    def _encode_uncached(self, text: str) -> list[int]:
        text.encode()
        return self.tokenizer.encode(text, add_special_tokens=False)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of sampled tokens, without special tokens."""
        return self.tokenizer.decode(  # type: ignore[return-value]
            list(token_ids), skip_special_tokens=True, clean_up_tokenization_spaces=False
        )

    def opens_reasoning(self, prompt_ids: Sequence[int]) -> bool:
        """Return whether a prompt ends with `<think>`, so that the reply starts with reasoning."""
        return _OPEN_REASONING.search(self.tokenizer.decode(list(prompt_ids[-16:]))) is not None  # type: ignore[arg-type]

    def render(self, messages: Sequence[Message], tools: Sequence[Any] | None, *, add_generation_prompt: bool) -> str:
        """Return the template's text of a conversation.

        Raises:
            TemplateError: the tokenizer has no template, or the template rejects the messages or ignores the tools.
        """
        source = self.source
        if source is None:
            raise TemplateError(
                "messages require a chat template, and the tokenizer has none: set tokenizer.chat_template, or pass "
                "text= or token_ids= instead of messages"
            )
        self.check_tools(tools)
        try:
            return self.tokenizer.apply_chat_template(  # type: ignore[return-value]
                [for_template(message, has_developer="developer" in source) for message in messages],
                tools=list(tools) if tools else None,
                add_generation_prompt=add_generation_prompt,
                tokenize=False,
                **self._kwargs,
            )
        except Exception as error:  # a template can raise any error
            raise TemplateError(
                f"the chat template of the model rejects these {len(messages)} messages (roles "
                f"{_shortened_roles(messages)}): {type(error).__name__}: {error}; change the messages, or set a "
                "tokenizer.chat_template that accepts them"
            ) from error

    def reply(self, messages: Sequence[Message], tools: Sequence[Any] | None) -> list[int]:
        """Return the tokens of the last message as a reply of the model, with the token that ends it.

        Raises:
            TemplateError: the template rejects the messages, or ignores a part of the reply, or the prompt of the reply
                is no prefix of them.
        """
        prompt = self.render(messages[:-1], tools, add_generation_prompt=True)
        text = self.render(messages, tools, add_generation_prompt=False)
        body, closing = self._split_closing(text, messages[-1]["content"])
        if not body.startswith(prompt):
            found = fork("template", prompt, body)
            raise TemplateError(
                "the chat template must write a reply right after its prompt; expected text that starts with "
                f"{found.expected!r}, got {found.received!r}"
            )
        self._check_complete(messages, len(messages) - 1, tools, text)
        return self.encode_continuation(body.removeprefix(prompt) + (closing or str(self.tokenizer.eos_token)))

    def encode_continuation(self, text: str) -> list[int]:
        """Return the tokens of a text that follows another one: without the space that SentencePiece prepends."""
        start, ids = self.encode("\n"), self._encode_uncached("\n" + text)
        return ids[len(start) :] if ids[: len(start)] == start else self._encode_uncached(text)

    def _check_complete(self, messages: Sequence[Message], number: int, tools: Any, text: str) -> None:
        """Raise a TemplateError if `text`, the template's text of the messages, lacks a part of the reply `number`."""
        reply = messages[number]
        texts = [name for name in ("content", "reasoning_content") if reply.get(name, "").strip()]
        changed: dict[str, Any] = {name: f"{reply[name]}?" for name in texts}
        if "tool_calls" in reply:
            first, *rest = reply["tool_calls"]
            name = first["function"]["name"] + "?"
            changed["tool_calls"] = [first | {"function": first["function"] | {"name": name}}, *rest]
        for name, value in changed.items():
            others = [*messages[:number], reply | {name: value}, *messages[number + 1 :]]
            if self.render(others, tools, add_generation_prompt=False) == text:
                raise TemplateError(
                    f"the chat template ignores {name} of messages[{number}], so it cannot be trained on; remove it, "
                    "or set a tokenizer.chat_template that uses it"
                )

    @property
    def marks_replies(self) -> bool:
        """Whether the template marks the replies of the assistant with `{% generation %}`, for `encode_marked`."""
        return self.source is not None and _GENERATION.search(self.source) is not None

    def encode_marked(self, messages: Sequence[Message], tools: Sequence[Any] | None) -> tuple[list[int], list[int]]:
        """Return the tokens of a conversation, and for each 1 if it is in a `{% generation %}` block, else 0.

        Raises:
            TemplateError: the template rejects the messages, or ignores a part of a reply.
        """
        cleaned = [clean_message(message, number) for number, message in enumerate(messages)]
        text = self.render(cleaned, tools, add_generation_prompt=False)  # raises if the template rejects them
        for number, message in enumerate(cleaned):
            if message["role"] == "assistant":
                self._check_complete(cleaned, number, tools, text)
        encoded = self.tokenizer.apply_chat_template(
            [for_template(message, has_developer="developer" in str(self.source)) for message in cleaned],
            tools=list(tools) if tools else None,
            return_dict=True,
            return_assistant_tokens_mask=True,
            **self._kwargs,
        )
        return list(encoded["input_ids"]), list(encoded["assistant_masks"])  # type: ignore[index]

    def fingerprint(self, prompt: str) -> Fingerprint:
        """Return what `suffix` needs to know of the text of the prompt that the reply was sampled for."""
        text = self._removable.sub("", _OPEN_REASONING.sub("", prompt))
        return len(text), hash(text)

    def suffix(
        self,
        messages: Sequence[Message],
        count: int,
        tools: Sequence[Any] | None,
        *,
        generation: Generation,
        fingerprint: Fingerprint | None,
    ) -> tuple[list[int], str] | Fork:
        """Return the tokens that the template puts between a sampled reply and the next one.

        They are the difference of two renderings, the history and the history with the new messages, so they depend
        neither on how the template would write the sampled reply nor on its tokens. An end token that was sampled takes
        the place of the one that the template writes.

        Args:
            messages: the whole conversation.
            count: number of messages up to the sampled reply.
            tools: tools of the conversation.
            generation: the sampled reply.
            fingerprint: of the prompt of the reply; None if that was no conversation.

        Returns:
            The tokens, which start right after the last sampled one, and the template's text of the conversation; a
            `Fork` if the template writes the history differently once the new messages follow. An empty reasoning
            block makes no difference, nor does any reasoning with `keep_reasoning`.

        Raises:
            TemplateError: the template rejects the messages.
        """
        before = self.render(messages[:count], tools, add_generation_prompt=False)
        after = self.render(messages, tools, add_generation_prompt=True)
        reply, start = messages[count - 1], 0
        if not reply["content"].strip():  # a special token before it belongs to the prompt
            start = len(self.render(messages[: count - 1], tools, add_generation_prompt=True).rstrip())
        body, closing = self._split_closing(before, reply["content"], start)
        position = _end_of_history(body, after, closing, self._removable)
        if position is None:
            is_reasoning = _end_of_history(body, after, closing, _REASONING) is not None
            return fork("reasoning" if is_reasoning else "template", before, after)
        if fingerprint is not None and self._fingerprint_of_start(before, fingerprint[0]) != fingerprint:
            prompt = self.render(messages[: count - 1], tools, add_generation_prompt=True)
            return fork("template", prompt, before)
        reasoning = messages[count - 1].get("reasoning_content", "").strip()
        if not self._keep_reasoning and reasoning and self._drops_reasoning(messages[:count], tools, before):
            return fork("reasoning", f"<think>\n{reasoning}\n</think>", before[-200:])
        ids = self.encode_continuation(after[position:])
        last = generation.token_ids[-1] if generation.token_ids else None
        opens_next = ids[:1] == [last]  # where no token closes a reply, the sampled one opens the next message
        if last in self._special.values() and (opens_next or (generation.finish_reason == "stop" and closing)):
            ids = ids[1:]
        return ids, after

    def check_tools(self, tools: Sequence[Any] | None) -> None:
        """Raise a TemplateError if the template ignores `tools`."""
        source = self.source
        if tools and source is not None and (names := self._variables(source)) is not None and "tools" not in names:
            raise TemplateError(
                f"the chat template ignores tools, and there are {len(tools)}; describe them in a message, or set a "
                "tokenizer.chat_template that uses them"
            )

    def _variables(self, source: str) -> frozenset[str] | None:
        """Return the variables of a template; None if the tokenizer may use others."""
        is_own = type(self.tokenizer).apply_chat_template is not PreTrainedTokenizerBase.apply_chat_template
        return None if is_own or "chat_template" in self._kwargs else variables(source)

    def _check_kwargs(self) -> None:
        template: Any = self.tokenizer.chat_template
        sources = [] if template is None else list(template.values()) if isinstance(template, Mapping) else [template]
        found = [self._variables(source) for source in sources]
        known = {name for names in found if names is not None for name in names}
        known_to_transformers = inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters
        unknown = sorted(self._kwargs.keys() - known - known_to_transformers.keys())
        if unknown and found and None not in found:
            raise TemplateError(
                f"the chat template does not use {', '.join(unknown)}; its variables are {', '.join(sorted(known))}; "
                "correct or remove these template_kwargs"
            )

    def _drops_reasoning(self, messages: Sequence[Message], tools: Any, text: str) -> bool:
        """Return whether `text`, the template's text of a conversation, is the same without the last reasoning."""
        *others, last = messages
        without = {name: value for name, value in last.items() if name != "reasoning_content"}
        return self.render([*others, without], tools, add_generation_prompt=False) == text

    def _split_closing(self, before: str, content: str, start: int = 0) -> tuple[str, str]:
        """Split a history into the text up to the end of its last reply, and the special token that closes the reply,
        if it is behind the first `start` characters, which are the prompt's.

        Without such a token, the reply's own whitespace belongs to the reply, any other to what follows.
        """
        text = before.rstrip()
        closing = max((token for token in self._special if text.endswith(token)), key=len, default="")
        if closing and len(text) - len(closing) < start:
            return before, ""
        if closing:
            return text.removesuffix(closing), closing
        kept = text + content[len(content.rstrip()) :]
        return (kept if before.startswith(kept) else text), ""

    def _fingerprint_of_start(self, text: str, length: int) -> Fingerprint:
        start = self._removable.sub("", text)[:length]
        return len(start), hash(start)


def _end_of_history(body: str, after: str, closing: str, removable: re.Pattern[str]) -> int | None:
    """Return the position in `after` where the history `body` ends and the closing token follows.

    `after` may lack blocks of `body` that match `removable`, or have different ones and whitespace there.

    Returns:
        The position; None if the histories differ.
    """
    if after.startswith(body + closing):
        return len(body)
    position = 0
    for number, piece in enumerate(removable.split(body)):
        if number > 0:
            position = _skip(after, position, removable)
        if not after.startswith(piece, position):
            return None
        position += len(piece)
    return position if after.startswith(closing, position) else None


def _skip(text: str, position: int, removable: re.Pattern[str]) -> int:
    while True:
        while position < len(text) and text[position].isspace():
            position += 1
        block = removable.match(text, position)
        if block is None:
            return position
        position = block.end()


def _shortened_roles(messages: Sequence[Message]) -> str:
    roles = [message["role"] for message in messages]
    return ", ".join(roles if len(roles) <= 12 else [*roles[:2], "...", *roles[-8:]])
