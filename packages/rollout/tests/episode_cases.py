"""A problem, episodes with one request, and how to run one."""

import asyncio

from tidemill_rollout import EpisodeResult, Policy, Problem

PROBLEM = Problem(prompt="hello")


def run(policy: Policy, episode, **settings) -> EpisodeResult:
    return asyncio.run(policy.run(episode, PROBLEM, **settings))


async def asks(problem, session):
    await session.generate(text="hello")
    return 1.0


def asks_blocking(problem, session):
    session.generate(text="hello")
    return 1.0
