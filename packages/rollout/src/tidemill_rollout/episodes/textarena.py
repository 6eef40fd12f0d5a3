"""Single-player games of the package textarena."""

import random
import threading
from typing import Any

import textarena
from textarena.envs.registration import ENV_REGISTRY

from tidemill_rollout.episode import EpisodeFn
from tidemill_rollout.episodes.gym import gym_episode

_random_lock = threading.Lock()
_LOCK_TIMEOUT_S = 60.0


def textarena_game(name: str, *, max_turns: int = 100, **options: Any) -> EpisodeFn:
    """Return the episode that plays a game; its reward is that of the game, usually 1.0 for a solved one.

    Args:
        name: name of a single-player game without the suffix of a wrapper, such as "GuessTheNumber-v0".
        max_turns: maximum number of moves; games have limits of their own.
        options: arguments of the game.

    Raises:
        ValueError: there is no such game.
    """
    if f"{name}-raw" not in ENV_REGISTRY:
        raise ValueError(f"textarena has no game {name!r} with a variant {name}-raw; see textarena.envs.registration")
    return gym_episode(lambda problem: TextArenaEnv(textarena.make(f"{name}-raw", **options)), max_turns=max_turns)


class TextArenaEnv:
    """A game as a `TextEnv`.

    Games draw from Python's global random generator. Each one has a state of it for itself here, so that games in
    several threads are reproducible.

    Args:
        env: a single-player game without wrappers, whose observations contain only what is new.
    """

    def __init__(self, env: textarena.Env) -> None:
        self._env = env
        self._random_state: Any = None

    def reset(self, *, seed: int) -> tuple[str, dict[str, Any]]:
        """Start the game."""
        self._random_state = random.Random(seed).getstate()
        self._call(lambda: self._env.reset(num_players=1, seed=seed))
        return self._observation(), {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Make a move. Only the last one has a reward."""
        is_done, info = self._call(lambda: self._env.step(action))
        if not is_done:
            return self._observation(), 0.0, False, False, info
        rewards, _ = self._env.close()
        return "", float(rewards[0]), True, False, info

    def close(self) -> None:
        """Do nothing: textarena's `close` only returns the rewards."""

    def _observation(self) -> str:
        _, messages = self._env.get_observation()
        own = textarena.ObservationType.PLAYER_ACTION
        return "\n".join(text for _, text, kind in messages if kind is not own)

    def _call(self, function: Any) -> Any:
        if not _random_lock.acquire(timeout=_LOCK_TIMEOUT_S):
            raise RuntimeError(f"another game of this process has not returned for {_LOCK_TIMEOUT_S:g} s")
        try:
            other = random.getstate()
            random.setstate(self._random_state)
            try:
                return function()
            finally:
                self._random_state = random.getstate()
                random.setstate(other)
        finally:
            _random_lock.release()
