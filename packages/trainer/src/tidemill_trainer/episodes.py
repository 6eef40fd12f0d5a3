"""The episode of a run, found by name, and the error of a run whose episodes fail."""

import inspect
from collections.abc import Callable
from typing import get_origin

from tidemill_rollout import EpisodeFn, load_episode
from tidemill_rollout.episodes import RewardEndpoint, endpoint_turn, single_turn

from tidemill_trainer.config import Config
from tidemill_trainer.config_file import ConfigError
from tidemill_trainer.rewards import reward_function


class EpisodeError(RuntimeError):
    """Too many episodes failed; the message has the reasons.

    Attributes:
        is_of_engine: whether requests to engines failed.
    """

    def __init__(self, message: str, *, is_of_engine: bool = False) -> None:
        super().__init__(message)
        self.is_of_engine = is_of_engine


class NoSignalError(EpisodeError):
    """All rounds of generation gave too few groups with different rewards."""


def create_episode(config: Config) -> EpisodeFn:
    """Return the episode of `config.episode.function`; "single_turn" is scored by `config.reward.function`.

    Raises:
        ConfigError: a function does not exist, cannot be imported or has other parameters; the message names file and
            function. Or `reward.url` is no address.
    """
    reward = config.reward
    if reward.url is not None:  # reward.function is "endpoint"
        try:
            return endpoint_turn(RewardEndpoint(reward.url, timeout_s=reward.timeout_s))
        except ValueError as error:
            raise ConfigError(f"config key reward.url: {error}") from error
    if config.episode.function == "single_turn":
        return single_turn(reward_function(config), reward_timeout_s=reward.timeout_s)
    try:
        episode = load_episode(config.episode.function)
    except (ValueError, ImportError) as error:
        built_in = "" if ":" in config.episode.function else '; or "single_turn", which reward.function scores'
        raise ConfigError(f"config key episode.function: {error}{built_in}") from error
    _check_parameters(config.episode.function, episode)
    return episode


def _check_parameters(name: str, episode: EpisodeFn) -> None:
    """Check that an episode accepts a problem and a session.

    Raises:
        ConfigError: it has other parameters, or is annotated as a function that returns an episode.
    """
    try:
        signature = inspect.signature(episode)
    except ValueError:  # a function of an extension module
        return
    if get_origin(signature.return_annotation) is Callable:
        raise ConfigError(
            f"config key episode.function: {name} returns an episode, expected the episode itself; call it in a "
            f"file of your own, such as `episode = {name.rpartition(':')[2]}(...)` in env.py, and set "
            'episode.function="env.py:episode"'
        )
    try:
        signature.bind("problem", "session")
    except TypeError as error:
        raise ConfigError(
            f"config key episode.function: {name} must accept the arguments (problem, session), got the parameters "
            f"{signature}"
        ) from error
