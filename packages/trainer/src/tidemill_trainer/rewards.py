"""Reward functions, found by name."""

from typing import Any

from tidemill_rollout import Registry
from tidemill_rollout.episodes.reward import RewardFn

from tidemill_trainer.config_file import ConfigError

_functions: Registry[RewardFn] = Registry("reward function")


def register_reward(name: str):
    """Register the decorated function for `reward.function = name`; see `Registry.register`."""
    return _functions.register(name)


@register_reward("exact_match")
async def exact_match(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any) -> float:
    """Return 1.0 if the response equals the ground truth, apart from surrounding whitespace; else 0.0."""
    return float(solution_str.strip() == str(ground_truth).strip())


def load_reward(function: str) -> RewardFn:
    """Load a reward function by registered name, "pkg.mod:attr" or "path/file.py:attr".

    Raises:
        ConfigError: the function does not exist or cannot be imported; the message names file and function.
    """
    try:
        return _functions.load(function)
    except (ValueError, ImportError) as error:
        raise ConfigError(f"config key reward.function: {error}") from error
