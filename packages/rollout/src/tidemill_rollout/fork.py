"""An example of a request that could not continue a recorded token sequence."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

_MAX_LENGTH = 2000
_CONTEXT = 40


@dataclass(frozen=True, kw_only=True, slots=True)
class Fork:
    """A request that started a token sequence instead of continuing a recorded one.

    Attributes:
        reason: "edited": an earlier message differs from the recorded one; "shortened": recorded messages are left
            out; "repeated": another reply to the same messages; "unrelated": no message but the system prompt is
            recorded; "tools": other tools; "reasoning": the chat template removes the reasoning of earlier replies;
            "template": it writes the history differently in another way.
        expected, received: the recorded and the received text, from shortly before their first difference.
    """

    reason: str
    expected: str
    received: str


def fork(reason: str, expected: str, received: str) -> Fork:
    """Return a fork whose texts start shortly before their first difference and have a bounded length."""
    start = max(0, common_length(expected, received) - _CONTEXT)
    lead = "..." if start else ""
    return Fork(
        reason=reason,
        expected=lead + _shorten(expected[start:]),
        received=lead + _shorten(received[start:]),
    )


def common_length(first: Sequence[Any], second: Sequence[Any]) -> int:
    """Return the length of the common start of two sequences."""
    pairs = zip(first, second, strict=False)
    return next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(first), len(second)))


def _shorten(text: str) -> str:
    return text if len(text) <= _MAX_LENGTH else f"{text[:_MAX_LENGTH]}..."
