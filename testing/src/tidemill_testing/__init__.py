"""Process-group runner and tiny checkpoints for the tests of tidemill."""

from tidemill_testing.ranks import run_ranks
from tidemill_testing.tiny import tiny_model, tiny_reward_model

__all__ = ["run_ranks", "tiny_model", "tiny_reward_model"]
