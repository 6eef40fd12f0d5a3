"""A model's chat template: the text of a conversation, and the text that follows a sampled reply."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from tidemill_rollout.errors import TemplateError
from tidemill_rollout.messages import Message, for_template

_REASONING = re.compile(r"<think>.*?</think>\s*", re.DOTALL)
_EMPTY_REASONING = re.compile(r"<think>\s*</think>\s*")


class ChatTemplate:
    """Render conversations with the chat template of a tokenizer.

    Args:
        tokenizer: tokenizer of the model, with a chat template if messages are used.
        kwargs: additional variables of the template, such as `{"enable_thinking": False}`.
        keep_reasoning: what happens where the template removes the reasoning of earlier replies (Qwen3 does so when the
            next user message comes). False: follow the template, with a new token sequence for the shortened history.
            True: continue the tokens as they were sampled.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        kwargs: Mapping[str, Any] | None = None,
        keep_reasoning: bool = False,
    ) -> None:
        self.tokenizer = tokenizer
        self._kwargs = dict(kwargs or {})
        self._keep_reasoning = keep_reasoning

    @property
    def source(self) -> str | None:
        """Source text of the template; None if the tokenizer has none, or several by name."""
        template = self.tokenizer.chat_template
        return template if isinstance(template, str) else None

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text that contains its special tokens."""
        return self.tokenizer.encode(text, add_special_tokens=False)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of sampled tokens, without special tokens."""
        return self.tokenizer.decode(list(token_ids), skip_special_tokens=True)  # type: ignore[return-value]

    def opens_reasoning(self, prompt_ids: Sequence[int]) -> bool:
        """Return whether a prompt ends with `<think>`, so that the reply starts with reasoning."""
        return self.tokenizer.decode(list(prompt_ids[-4:])).rstrip().endswith("<think>")  # type: ignore[union-attr]

    def render(self, messages: Sequence[Message], tools: Sequence[Any] | None, *, add_generation_prompt: bool) -> str:
        """Return the template's text of a conversation.

        Raises:
            TemplateError: the tokenizer has no template, or the template rejects the messages.
        """
        try:
            return self.tokenizer.apply_chat_template(  # type: ignore[return-value]
                [for_template(message) for message in messages],
                tools=list(tools) if tools else None,
                add_generation_prompt=add_generation_prompt,
                tokenize=False,
                **self._kwargs,
            )
        except Exception as error:  # a template can raise any error
            raise TemplateError(
                f"the chat template of the model rejects these {len(messages)} messages (roles "
                f"{', '.join(message['role'] for message in messages)}): {type(error).__name__}: {error}"
            ) from error

    def suffix(
        self, history: Sequence[Message], new: Sequence[Message], tools: Sequence[Any] | None, last_token: str
    ) -> str | None:
        """Return the text that the template puts between a sampled reply and the next one.

        It is the difference of two renderings, the history and the history with the new messages, so it depends neither
        on how the template would write the sampled reply nor on its tokens.

        Args:
            history: messages that end with the sampled reply.
            new: messages after the reply.
            tools: tools of the conversation.
            last_token: text of the last sampled token.

        Returns:
            The text, which starts right after the last sampled token; None if the template writes the history
            differently once the new messages follow. An empty reasoning block makes no difference, nor does any
            reasoning with `keep_reasoning`.

        Raises:
            TemplateError: the template rejects the messages.
        """
        before = self.render(history, tools, add_generation_prompt=False).rstrip()
        after = self.render([*history, *new], tools, add_generation_prompt=True)
        special = self.tokenizer.all_special_tokens
        marker = next((token for token in special if token and before.endswith(token)), "")
        body = before.removesuffix(marker)
        start = self._position_after(body, after, marker)
        if start is None:
            return None
        rest = after[start:]
        if last_token not in special:  # the reply was cut off, so the closing token follows
            return rest
        # Where no token closes a reply, the sampled one opens the next message, whose text starts with it.
        return rest.removeprefix(marker or last_token)

    def _position_after(self, body: str, after: str, marker: str) -> int | None:
        """Return the position in `after` where the history `body` ends; None if the histories differ."""
        if after.startswith(body):
            return len(body)
        if not marker:
            return None
        parts = after.split(marker)
        count = body.count(marker) + 1
        same = marker.join(parts[:count])
        removable = _REASONING if self._keep_reasoning else _EMPTY_REASONING
        if len(parts) <= count or removable.sub("", same) != removable.sub("", body):
            return None
        return len(same)
