"""Examples of supervised fine-tuning: tokens, and which of them are trained on."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
from tidemill_dataproto import DataProto, ragged
from tidemill_rollout import ChatTemplate, Trajectory
from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, kw_only=True, slots=True)
class Example:
    """One token sequence.

    Attributes:
        token_ids: prompt and response, length j.
        num_prompt_tokens: number of tokens before the first trained one; at least 1.
        response_mask: for each token after the prompt 1 if it is trained on, else 0.
    """

    token_ids: Sequence[int]
    num_prompt_tokens: int
    response_mask: Sequence[int]

    @classmethod
    def of_trajectory(cls, row: Trajectory) -> Self:
        """Create the example of a recorded or given conversation."""
        return cls(token_ids=row.token_ids, num_prompt_tokens=row.num_prompt_tokens, response_mask=row.response_mask)

    @classmethod
    def of_text(
        cls, prompt_ids: Sequence[int], response: str, template: ChatTemplate, *, end: int | None = None
    ) -> Self:
        """Create the example of a text that follows a prompt.

        Args:
            prompt_ids: tokens of the prompt.
            response: text, which is encoded as it is.
            template: template with the tokenizer of the model.
            end: token that ends the response, such as `end_of_reply` after messages; None: the tokenizer's end token.
        """
        eos: int = template.tokenizer.eos_token_id  # type: ignore[assignment]
        ids = [*template.encode_continuation(response), eos if end is None else end]
        return cls(token_ids=[*prompt_ids, *ids], num_prompt_tokens=len(prompt_ids), response_mask=[1] * len(ids))

    @classmethod
    def of_mask(cls, token_ids: Sequence[int], mask: Sequence[int]) -> Self:
        """Create the example of tokens with a mask [j]; the first token has no prediction and is never trained on."""
        first = next((number for number, trained in enumerate(mask) if trained and number > 0), len(mask))
        return cls(token_ids=token_ids, num_prompt_tokens=first, response_mask=mask[first:])

    def truncated(self, length: int) -> Self:
        """Return the first `length` tokens."""
        kept = length - self.num_prompt_tokens
        return type(self)(
            token_ids=self.token_ids[:length],
            num_prompt_tokens=min(self.num_prompt_tokens, length),
            response_mask=self.response_mask[: max(kept, 0)],
        )


def end_of_reply(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the last special token that the chat template writes after a reply; without one, the EOS token."""
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "a"}]
    text = str(tokenizer.apply_chat_template(messages, tokenize=False)).rstrip()
    last = tokenizer.encode(text, add_special_tokens=False)[-1]
    token = tokenizer.added_tokens_decoder.get(last)
    return last if token is not None and token.special else tokenizer.eos_token_id  # type: ignore[return-value]


def to_batch(examples: Sequence[Example]) -> DataProto:
    """Return the ragged columns `input_ids` int64 [B, j], `responses` int64 and `response_mask` float32."""
    ids = [torch.tensor(example.token_ids, dtype=torch.int64) for example in examples]
    responses = ragged.ragged_from_list(
        [tokens[example.num_prompt_tokens :] for tokens, example in zip(ids, examples, strict=True)]
    )
    mask = torch.tensor([float(value) for example in examples for value in example.response_mask])
    return DataProto.from_dict(
        {
            "responses": responses,
            "response_mask": ragged.like(mask, responses),
            "input_ids": ragged.ragged_from_list(ids),
        }
    )
