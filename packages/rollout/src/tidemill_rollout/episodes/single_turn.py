"""One question, one answer, one reward."""

import math

from tidemill_rollout.episode import EpisodeFn, name_of
from tidemill_rollout.episodes.reward import RewardFn, score
from tidemill_rollout.outcome import Outcome
from tidemill_rollout.problem import Problem
from tidemill_rollout.session import Reply, Session


def single_turn(reward: RewardFn, *, reward_timeout_s: float = math.inf) -> EpisodeFn:
    """Return the episode that generates one reply to the prompt and scores its text.

    Args:
        reward: reward function, which receives the reply without special tokens. One that never returns keeps its
            thread until the process ends.
        reward_timeout_s: time limit of the reward function.
    """

    async def episode(problem: Problem, session: Session) -> Outcome:
        reply = await generate_reply(problem, session)
        return await score(reward, problem, reply.text, timeout_s=reward_timeout_s)

    episode.__qualname__ = f"single_turn({name_of(reward)})"  # named by errors
    return episode


async def generate_reply(problem: Problem, session: Session) -> Reply:
    """Generate a reply to the prompt of a problem: a text as it is, messages and tools in the chat template.

    The model's calls of the tools are not executed; they remain in the text of the reply.
    """
    prompt = problem.prompt
    if isinstance(prompt, str):
        return await session.generate(text=prompt)
    return await session.generate(prompt, tools=problem.tools)
