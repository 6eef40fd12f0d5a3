"""A problem: what an episode starts from."""

from copy import deepcopy
from dataclasses import dataclass
from typing import Any

from tidemill_rollout.messages import Message


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """One problem of a data set.

    Attributes:
        prompt: a text that is encoded without a chat template and without adding a BOS, or chat messages.
        ordinal: position in the stream of problems, from 0; the trainer's validation has ordinals of its own.
        id: name in logs and reports; unique in the run.
        data_source: name of the data set; selects metrics, and is passed to reward functions.
        ground_truth: what a reward function compares the answer with.
        extra_info: any further data of the row.
        tools: tools in OpenAI's format that `single_turn` puts into a prompt of chat messages; None without tools.
    """

    prompt: str | list[Message]
    ordinal: int = 0
    id: str = ""
    data_source: str = "data"
    ground_truth: Any = None
    extra_info: Any = None
    tools: list[dict[str, Any]] | None = None

    @property
    def messages(self) -> list[Message]:
        """The prompt as messages, a copy that the episode may change; a text is one user message."""
        return [{"role": "user", "content": self.prompt}] if isinstance(self.prompt, str) else deepcopy(self.prompt)
