"""Environments of the package skyrl-gym."""

from collections.abc import Mapping
from typing import Any

import skyrl_gym

from tidemill_rollout.episode import EpisodeFn
from tidemill_rollout.episodes.gym import gym_episode
from tidemill_rollout.messages import Message
from tidemill_rollout.problem import Problem


def skyrl_environment(name: str, *, env_config: Any = None, max_turns: int = 100) -> EpisodeFn:
    """Return the episode of a registered environment.

    The environment receives the problem's messages as its prompt, and as `extras` what SkyRL makes of a row:
    `reward_spec`, `data_source`, `extra_info` and the entries of `extra_info`, such as `max_turns`.

    Args:
        name: name of the environment, such as "gsm8k_multi_turn".
        env_config: configuration of the environment.
        max_turns: maximum number of steps.
    """

    def make_env(problem: Problem) -> SkyRLEnv:
        info = problem.extra_info if isinstance(problem.extra_info, Mapping) else {}
        extras = {
            **info,
            "reward_spec": {"ground_truth": problem.ground_truth},
            "data_source": problem.data_source,
            "extra_info": dict(info),
        }
        return SkyRLEnv(skyrl_gym.make(name, env_config=env_config, extras=extras), problem.messages)

    return gym_episode(make_env, max_turns=max_turns)


class SkyRLEnv:
    """An environment of skyrl-gym as a `TextEnv`.

    A `postprocessed_action` is ignored: the conversation continues the tokens that were sampled.

    Args:
        env: the environment.
        prompt: messages for its `init`.
    """

    def __init__(self, env: Any, prompt: list[Message]) -> None:
        self._env = env
        self._prompt = prompt

    def reset(self, *, seed: int) -> tuple[list[Message], dict[str, Any]]:
        """Return the environment's own prompt. skyrl-gym has no seeds."""
        return self._env.init(self._prompt)

    def step(self, action: str) -> tuple[list[Message], float, bool, bool, dict[str, Any]]:
        """Pass a reply to the environment."""
        output = self._env.step(action)
        return output["observations"], float(output["reward"]), bool(output["done"]), False, output["metadata"]

    def close(self) -> None:
        """Close the environment."""
        self._env.close()
