"""A session at an endpoint, with a client of the `openai` package."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import openai
from tidemill_rollout import Endpoint, Policy, Session

USER = {"role": "user", "content": "hello"}
LIMIT_S = 60  # a test that waits longer has failed


def client_of(session: Session) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=session.base_url, api_key=session.api_key)


@contextlib.asynccontextmanager
async def served(policy: Policy) -> AsyncIterator[tuple[Session, openai.AsyncOpenAI]]:
    """A session at an endpoint, with a client."""
    async with asyncio.timeout(LIMIT_S), Endpoint() as endpoint:
        session = policy.session()
        endpoint.add(session)
        async with client_of(session) as client:
            yield session, client
