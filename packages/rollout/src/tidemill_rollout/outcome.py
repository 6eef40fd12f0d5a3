"""How an episode ended."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Status = Literal["ok", "truncated", "model_error", "environment_error"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """The result of an episode.

    Attributes:
        reward: the reward that is trained on.
        status: "ok"; "truncated": a limit of length, turns or time was reached; "model_error": the model made it
            impossible to continue; "environment_error": the environment failed. The last is never trained on.
        reason: what happened, for every status but "ok"; it starts with a word that outcomes are counted by.
        metrics: further numbers, such as "acc", the accuracy for validation.
    """

    reward: float
    status: Status = "ok"
    reason: str = ""
    metrics: Mapping[str, float] = field(default_factory=dict)

    @property
    def is_trainable(self) -> bool:
        """Whether the episode may be trained on."""
        return self.status != "environment_error"


def to_outcome(result: Any) -> Outcome:
    """Return the outcome for what an episode function returned.

    Args:
        result: a number; a dict with "score" (or "reward") and further numbers, such as "acc"; or an `Outcome`.

    Raises:
        TypeError: any other type.
        ValueError: a dict without a score, or a number that is not finite.
    """
    if isinstance(result, Outcome):
        _check_finite(result.reward, result)
        return result
    if isinstance(result, Mapping):
        numbers = {str(name): _number(value, result) for name, value in result.items()}
        name = next((name for name in ("score", "reward") if name in numbers), None)
        if name is None:
            raise ValueError(f'an episode that returns a dict must set "score", got the keys {sorted(numbers)}')
        return Outcome(reward=numbers.pop(name), metrics=numbers)
    return Outcome(reward=_number(result, result))


def _number(value: Any, result: Any) -> float:
    try:
        number = float(value) if not isinstance(value, str) else None
    except (TypeError, ValueError):
        number = None
    if number is None:
        raise TypeError(f'an episode must return a number, a dict with "score" or an Outcome, got {result!r}'[:500])
    _check_finite(number, result)
    return number


def _check_finite(number: float, result: Any) -> None:
    if not math.isfinite(number):
        raise ValueError(f"an episode must return finite numbers, got {result!r}"[:500])
