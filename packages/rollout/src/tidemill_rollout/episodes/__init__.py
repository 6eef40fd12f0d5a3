"""Episodes for common kinds of environments, and problems and scorers for them. Each one's dependencies are extras."""

from tidemill_rollout.episodes.reward import RewardFn
from tidemill_rollout.episodes.reward_endpoint import RewardEndpoint, endpoint_turn
from tidemill_rollout.episodes.single_turn import single_turn
from tidemill_rollout.episodes.tool_loop import tool_loop

__all__ = ["RewardEndpoint", "RewardFn", "endpoint_turn", "single_turn", "tool_loop"]
