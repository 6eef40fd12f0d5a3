"""Episodes for reinforcement learning: any environment or agent, with an exact record of the sampled tokens."""

from tidemill_rollout.demonstration import demonstration
from tidemill_rollout.endpoint import Endpoint
from tidemill_rollout.engine import Engine, Generation, SamplingParams
from tidemill_rollout.episode import EpisodeFn, EpisodeResult, load_episode, register_episode, run_episode
from tidemill_rollout.errors import (
    EngineClosedError,
    EngineDiedError,
    EngineError,
    LimitError,
    ModelError,
    SessionEndedError,
    TemplateError,
)
from tidemill_rollout.outcome import Outcome
from tidemill_rollout.parser import ReplyParser, tool_call_parser
from tidemill_rollout.policy import Policy
from tidemill_rollout.pool import EnginePool
from tidemill_rollout.problem import Problem
from tidemill_rollout.registry import Registry
from tidemill_rollout.session import Reply, Session, SessionConfig
from tidemill_rollout.sglang import SGLangEngine, SGLangServer
from tidemill_rollout.template import ChatTemplate
from tidemill_rollout.trajectory import Trajectory

__all__ = [
    "ChatTemplate",
    "Endpoint",
    "Engine",
    "EngineClosedError",
    "EngineDiedError",
    "EngineError",
    "EnginePool",
    "EpisodeFn",
    "EpisodeResult",
    "Generation",
    "LimitError",
    "ModelError",
    "Outcome",
    "Policy",
    "Problem",
    "Registry",
    "Reply",
    "ReplyParser",
    "SGLangEngine",
    "SGLangServer",
    "SamplingParams",
    "Session",
    "SessionConfig",
    "SessionEndedError",
    "TemplateError",
    "Trajectory",
    "demonstration",
    "load_episode",
    "register_episode",
    "run_episode",
    "tool_call_parser",
]
