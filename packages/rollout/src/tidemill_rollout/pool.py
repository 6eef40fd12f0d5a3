"""A pool of engines that serve the same model, as one engine."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tidemill_rollout.engine import Engine, Generation, SamplingParams
from tidemill_rollout.errors import EngineClosedError, EngineDiedError, EngineError

_MAX_FAILOVERS = 2
_MAX_SESSIONS = 1 << 16  # a session that is forgotten loses its prefix cache, nothing else


@dataclass(eq=False, slots=True)
class _Member:
    """An engine with its counts. A restarted engine is a new member.

    Attributes:
        name: its name in the pool.
        engine: the engine.
        num_running: requests that it is processing.
        num_requests: requests that it has received.
        last_request: ordinal of its last request in the pool.
        error: why it left the pool; None while it serves.
    """

    name: str
    engine: Engine
    num_running: int = 0
    num_requests: int = 0
    last_request: int = 0
    error: str | None = None


class EnginePool:
    """Distribute requests over engines. Use it from one event loop.

    A session's requests go to the engine of its previous one, which has its prefix in the cache; the first one goes to
    the engine with the fewest running requests.

    An engine whose call raises `EngineDiedError` leaves the pool, and its requests are sent to other engines with the
    same tokens and, if one was given, the same seed; each to at most two further ones, because it may be what crashes
    them. All other errors belong to the request and are raised.

    Args:
        engines: engines by name; names appear in errors and metrics.
        awaits_restart: where no engine is left, requests wait until one is restarted (`add`) instead of failing.
    """

    def __init__(self, engines: Mapping[str, Engine], *, awaits_restart: bool = False) -> None:
        if not engines:
            raise ValueError("an engine pool requires at least one engine, got none")
        self._members = {name: _Member(name, engine) for name, engine in engines.items()}
        self._awaits_restart = awaits_restart
        self._sessions: dict[str, _Member] = {}  # least recently used first
        self._num_requests = 0
        self._num_waiting = 0
        self._num_failovers = 0
        self._changed = asyncio.Event()

    def add(self, name: str, engine: Engine) -> None:
        """Add an engine, or replace the one of this name after a restart.

        Args:
            name: name of the engine.
            engine: the engine; it can be the same object as before.
        """
        self._members[name] = _Member(name, engine)
        self._notify()

    def remove(self, name: str) -> None:
        """Send no further requests to an engine. Those that it is processing end there.

        Args:
            name: name of the engine.

        Raises:
            ValueError: the pool has no engine of this name, or no other one.
        """
        if name not in self._members or len(self._members) == 1:
            raise ValueError(f"expected one of several engines of the pool, {', '.join(self._members)}, got {name!r}")
        del self._members[name]
        self._notify()

    async def generate(self, token_ids: Sequence[int], sampling: SamplingParams, *, session_id: str) -> Generation:
        """Sample one continuation; see `Engine.generate`.

        Raises:
            EngineDiedError: no engine is left; the message has the last error of each.
            EngineError: the request failed, or three engines died one after another while they processed it; the
                message names them.
        """
        died: list[str] = []
        while True:
            member = await self._member_for(session_id)
            self._num_requests += 1
            member.last_request = self._num_requests
            member.num_requests += 1
            member.num_running += 1
            try:
                return await member.engine.generate(token_ids, sampling, session_id=session_id)
            except EngineDiedError as error:
                member.error = str(error)
                self._num_failovers += 1
                self._notify()
                if isinstance(error, EngineClosedError):  # the request did not reach it
                    continue
                died.append(f"{member.name}: {error}")
                if len(died) > _MAX_FAILOVERS:
                    raise EngineError(
                        f"{len(died)} engines died one after another while they processed the same request, which is "
                        f"not sent to another ({'; '.join(died)}); check the logs of the engines"
                    ) from error
            finally:
                member.num_running -= 1

    def forget(self, session_id: str) -> None:
        """Let the next request of a session go to any engine: it has ended, or another one gets its name."""
        self._sessions.pop(session_id, None)

    def metrics(self) -> dict[str, float]:
        """Return counts: engines that can receive requests, waiting requests, failovers, and requests per engine."""
        values = {
            "num_engines": float(len(self._candidates())),
            "num_waiting": float(self._num_waiting),
            "num_failovers": float(self._num_failovers),
        }
        for name, member in self._members.items():
            values[f"num_running/{name}"] = float(member.num_running)
            values[f"num_requests/{name}"] = float(member.num_requests)
        return values

    def __str__(self) -> str:
        """Return the state of each engine."""
        return "; ".join(f"{name}: {self._state(member)}" for name, member in self._members.items())

    def _state(self, member: _Member) -> str:
        if member.error is not None:
            return f"failed: {member.error}"
        return f"serves ({member.num_running} running)"

    async def _member_for(self, session_id: str) -> _Member:
        """Assign an engine to the session, after waiting for one if none is left and one may be restarted."""
        while not (candidates := self._candidates()):
            if not self._awaits_restart and all(member.error is not None for member in self._members.values()):
                raise EngineDiedError(f"none of {len(self._members)} engines is left ({self}); restart them")
            self._num_waiting += 1
            try:
                await self._changed.wait()
            finally:
                self._num_waiting -= 1
        member = self._sessions.pop(session_id, None)
        if member not in candidates:
            member = min(candidates, key=lambda each: (each.num_running, each.last_request))
        self._sessions[session_id] = member
        if len(self._sessions) > _MAX_SESSIONS:
            del self._sessions[next(iter(self._sessions))]
        return member

    def _candidates(self) -> list[_Member]:
        return [member for member in self._members.values() if member.error is None]

    def _notify(self) -> None:
        """Let waiting requests look for an engine again."""
        self._changed.set()
        self._changed = asyncio.Event()
