"""How an episode ended."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal, get_args

from tidemill_rollout.errors import short

Status = Literal["ok", "truncated", "model_error", "environment_error"]
_MAX = 3.4028234663852886e38
"""The largest float32; rewards and metrics are float32 in training."""
_RULE = 'an episode or a reward function must return a number, a dict with "score" or an Outcome'


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """The result of an episode.

    Attributes:
        reward: the reward that is trained on.
        status: "ok"; "truncated": a limit of length, turns or time was reached; "model_error": the model made it
            impossible to continue; "environment_error": the environment failed. The last is never trained on.
        reason: what happened, for every status but "ok"; it starts with a word that outcomes are counted by.
        metrics: further numbers, such as "acc", the accuracy for validation; they become floats.

    Raises:
        TypeError: the reward or a metric is no number, or the reason is no text.
        ValueError: the reward or a metric is not finite in float32, or the status is unknown.
    """

    reward: float
    status: Status = "ok"
    reason: str = ""
    metrics: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "reward", _number(self.reward))
        metrics = {
            str(name): _number(value, f"the metric {name!r} of an episode must be a number")
            for name, value in self.metrics.items()
        }
        object.__setattr__(self, "metrics", metrics)
        _check_finite("reward", self.reward)
        for name, value in metrics.items():
            _check_finite(f"metric {name!r}", value)
        if not isinstance(self.reason, str):
            raise TypeError(f"the reason of an outcome must be text, got {short(self.reason)}")
        if self.status not in get_args(Status):
            raise ValueError(f"the status of an outcome must be one of {get_args(Status)}, got {self.status!r}")

    @property
    def is_trainable(self) -> bool:
        """Whether the episode may be trained on."""
        return self.status != "environment_error"


def truncated(
    limit: str, message: str, *, reward: float = 0.0, metrics: Mapping[str, float] = MappingProxyType({})
) -> Outcome:
    """Return the outcome of an episode that reached a limit: "length", "turns" or "time"."""
    return Outcome(reward=reward, status="truncated", reason=f"{limit}: {message}", metrics=metrics)


def to_outcome(result: Any) -> Outcome:
    """Return the outcome for what an episode function or a reward function returned.

    Args:
        result: a number; a dict with "score" (or "reward") and further entries, of which the numbers become metrics;
            or an `Outcome`. The entry "acc" is the accuracy. A tensor or an array of one element is a number.

    Raises:
        TypeError: any other type, or an "acc" that is no number.
        ValueError: a dict without a score, or a number that is not finite.
    """
    if isinstance(result, Outcome):
        return result
    if not isinstance(result, Mapping):
        return Outcome(reward=_number(result))
    name = next((name for name in ("score", "reward") if name in result), None)
    if name is None:
        raise ValueError(
            f'a dict that an episode or a reward function returns requires the key "score", got {short(result)}'
        )
    numbers = {key: _number_or_none(value) for key, value in result.items() if key != name}
    metrics = {key: number for key, number in numbers.items() if number is not None}
    if "acc" in result:
        rule = '"acc" of a dict that an episode or a reward function returns must be a number'
        metrics["acc"] = _number(result["acc"], rule)
    return Outcome(reward=_number(result[name]), metrics=metrics)


def _number(value: Any, rule: str = _RULE) -> float:
    number = _number_or_none(value)
    if number is None:
        raise TypeError(f"{rule}, got {short(value)}")
    return number


def _number_or_none(value: Any) -> float | None:
    try:
        return None if isinstance(value, str | bytes) else float(value)
    except OverflowError:
        return math.inf  # which `Outcome` refuses
    except (TypeError, ValueError, RuntimeError):  # RuntimeError: a tensor of several elements
        return None


def _check_finite(name: str, number: float) -> None:
    if not abs(number) <= _MAX:  # also True for NaN
        raise ValueError(f"expected a finite float32 as the {name} of an episode, got {number}")
