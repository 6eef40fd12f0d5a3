"""A training row: one token sequence of an episode."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tidemill_rollout.messages import Message


@dataclass(frozen=True, kw_only=True, slots=True)
class Trajectory:
    """One token sequence, from the first prompt to the last sampled token.

    Every sampled token of a trained branch is in exactly one trajectory with mask 1. Where sequences share turns, the
    first has them with mask 1 and the others have them as context.

    Attributes:
        token_ids: prompt and response, length j.
        num_prompt_tokens: tokens before the first sampled one.
        response_mask: for each token after the prompt 1 if it is trained on, else 0.
        rollout_log_probs: for each token after the prompt its log-prob, 0.0 where the mask is 0.
        versions: weight versions of the tokens with mask 1 as runs (version, number of tokens).
        branch: name of the branch, "main" for the session itself.
        finish_reason: of the last reply.
        turns: for each turn the number of context tokens and of sampled tokens, in order.
        messages: the conversation with the last reply; None for prompts of text or token ids.
        extra: further data of the engine for the last request, which processed all tokens but the last.
    """

    token_ids: Sequence[int]
    num_prompt_tokens: int
    response_mask: Sequence[int]
    rollout_log_probs: Sequence[float]
    versions: Sequence[tuple[str, int]]
    branch: str
    finish_reason: str
    turns: Sequence[tuple[int, int]] = field(default_factory=tuple)
    messages: Sequence[Message] | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)

    @property
    def prompt_ids(self) -> Sequence[int]:
        """Tokens before the first sampled one."""
        return self.token_ids[: self.num_prompt_tokens]

    @property
    def response_ids(self) -> Sequence[int]:
        """Tokens from the first sampled one, including the context of later turns."""
        return self.token_ids[self.num_prompt_tokens :]
