"""The episode of a run, found by name, and the error of a run whose episodes fail."""

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
        ConfigError: a function does not exist or cannot be imported; the message names file and function. Or
            `reward.url` is no address.
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
        return load_episode(config.episode.function)
    except (ValueError, ImportError) as error:
        raise ConfigError(f"config key episode.function: {error}") from error
