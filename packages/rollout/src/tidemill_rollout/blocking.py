"""The session of an episode function without `async`."""

import asyncio
from typing import Any

from tidemill_rollout.errors import SessionEndedError
from tidemill_rollout.session import Reply, Session


class BlockingSession:
    """`generate` and `branch` of a `Session`, for another thread than that of the event loop; they wait for a result.

    Args:
        session: the session.
        loop: event loop that the session belongs to.
    """

    def __init__(self, session: Session, loop: asyncio.AbstractEventLoop) -> None:
        self._session = session
        self._loop = loop
        self.id, self.seed = session.id, session.seed
        self.base_url, self.api_key = session.base_url, session.api_key

    def generate(self, *args: Any, **kwargs: Any) -> Reply:
        """Generate a reply; see `Session.generate`."""
        if self._loop.is_closed():  # the time limit has expired, and so has the program's event loop
            raise SessionEndedError(f"session {self.id} has ended; an episode must not use it after its return")
        return asyncio.run_coroutine_threadsafe(self._session.generate(*args, **kwargs), self._loop).result()

    def branch(self, name: str | None = None, *, is_trained: bool = True) -> "BlockingSession":
        """Return a session with a history of its own; see `Session.branch`."""
        return BlockingSession(self._session.branch(name, is_trained=is_trained), self._loop)
