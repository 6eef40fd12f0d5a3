"""Engines that the test holds, and a pool of them."""

import asyncio
from collections.abc import Sequence

from tidemill_rollout import EngineClosedError, EngineDiedError, EnginePool, Generation, SamplingParams

PROMPT = (5, 6, 7)
SAMPLING = SamplingParams(max_tokens=4, seed=11)


class HeldEngine:
    """An engine whose requests run until the test finishes them. Its tokens depend on prompt and seed alone.

    Attributes:
        running: running requests in the order of their start, with the id of their session.
        calls: id of the session of each request.
        is_dead: every call fails.
        is_closed: it had stopped before each call.
    """

    def __init__(self) -> None:
        self.running: list[tuple[str, asyncio.Future[None]]] = []
        self.calls: list[str] = []
        self.is_dead = self.is_closed = False

    async def generate(self, token_ids: Sequence[int], sampling: SamplingParams, *, session_id: str) -> Generation:
        self.calls.append(session_id)
        if self.is_closed:
            raise EngineClosedError("has stopped")
        if self.is_dead:
            raise EngineDiedError("connection refused")
        entry = session_id, asyncio.get_running_loop().create_future()
        self.running.append(entry)
        try:
            await entry[1]
        finally:
            self.running.remove(entry)
        return reply(token_ids, sampling)

    def finish(self, number: int = 0, error: Exception | None = None) -> None:
        future = self.running[number][1]
        if error is None:
            future.set_result(None)
        else:
            future.set_exception(error)

    def die(self) -> None:
        self.is_dead = True
        for _, future in self.running:
            future.set_exception(EngineDiedError("connection reset"))


def reply(token_ids: Sequence[int], sampling: SamplingParams) -> Generation:
    tokens = [(sum(token_ids) * 31 + (sampling.seed or 0) * 7 + i) % 97 for i in range(sampling.max_tokens or 0)]
    return Generation(token_ids=tokens, log_probs=[-1.0] * len(tokens), finish_reason="length", versions=[("0", 4)])


async def settle() -> None:
    """Let all tasks run until each of them waits for an engine or for the pool."""
    for _ in range(20):
        await asyncio.sleep(0)


class Case:
    """A pool of held engines "a", "b", ..., and the requests to it."""

    def __init__(self, names: str = "ab") -> None:
        self.engines = {name: HeldEngine() for name in names}
        self.pool = EnginePool(self.engines)

    async def start(self, session_id: str, sampling: SamplingParams = SAMPLING) -> asyncio.Task[Generation]:
        task = asyncio.ensure_future(self.pool.generate(PROMPT, sampling, session_id=session_id))
        await settle()
        return task

    def sessions(self, name: str) -> list[str]:
        return [session_id for session_id, _ in self.engines[name].running]
