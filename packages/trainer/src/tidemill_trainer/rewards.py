"""Reward functions, found by name."""

import inspect
from typing import Any

from tidemill_rollout import Registry
from tidemill_rollout.episodes.reward import RewardFn

from tidemill_trainer.config import Config
from tidemill_trainer.config_file import ConfigError

_functions: Registry[RewardFn] = Registry("reward function")
_ARGUMENTS = ("data_source", "solution_str", "ground_truth", "extra_info")


def register_reward(name: str):
    """Register the decorated function for `reward.function = name`; see `Registry.register`."""
    return _functions.register(name)


@register_reward("exact_match")
async def exact_match(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any) -> float:
    """Return 1.0 if the response equals the ground truth, apart from surrounding whitespace; else 0.0."""
    return float(solution_str.strip() == str(ground_truth).strip())


async def no_reward(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any) -> float:
    """Return 0.0, to which the trainer adds the score of the reward model."""
    return 0.0


def has_own_reward(config: Config) -> bool:
    """Return whether episodes have a reward before a reward model scores them."""
    return config.reward_model.path is None or config.reward.function is not None or has_own_episode(config)


def has_own_episode(config: Config) -> bool:
    """Return whether the episode is not "single_turn", the one that a reward function scores."""
    return config.episode.function != "single_turn"


def needs_ground_truth(config: Config) -> bool:
    """Return whether each problem requires a ground truth: the reward function is "exact_match"."""
    return not has_own_episode(config) and not config.reward.is_endpoint and reward_function(config) is exact_match


def reward_function(config: Config) -> RewardFn:
    """Return the reward function of the episode "single_turn", which is not "endpoint".

    Raises:
        ConfigError: see `load_reward`.
    """
    if config.reward.function is not None:
        return load_reward(config.reward.function)
    return exact_match if has_own_reward(config) else no_reward


def load_reward(function: str) -> RewardFn:
    """Load a reward function by registered name, "pkg.mod:attr" or "path/file.py:attr".

    Raises:
        ConfigError: the function does not exist, cannot be imported or has other parameters; the message names file and
            function.
    """
    try:
        loaded = _functions.load(function)
    except (ValueError, ImportError) as error:
        endpoint = "" if ":" in function else '; or "endpoint", a reward model on the server at reward.url'
        raise ConfigError(f"config key reward.function: {error}{endpoint}") from error
    try:
        parameters = inspect.signature(loaded)
    except ValueError:  # a function of an extension module
        return loaded
    try:
        parameters.bind(**dict.fromkeys(_ARGUMENTS))
    except TypeError as error:
        raise ConfigError(
            f"config key reward.function: {function} must accept the keyword arguments {', '.join(_ARGUMENTS)} (or "
            f"**kwargs), got the parameters {parameters}"
        ) from error
    return loaded
