"""Requests from episode workers to engines, which live in other processes.

An engine fetches the requests of an episode worker and returns results as they finish. Each call between the two actors
carries everything that has come up since the last one, so hundreds of requests need a handful of calls.
"""

import asyncio
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ray.exceptions import RayActorError
from tidemill_rollout import Engine, EngineClosedError, EngineDiedError, Generation, SamplingParams


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """A request to an engine.

    Attributes:
        id: number of the request, unique in its mailbox.
        token_ids: the whole prompt.
        sampling: sampling parameters.
        session_id: session of the request.
    """

    id: int
    token_ids: Sequence[int]
    sampling: SamplingParams
    session_id: str


Result = tuple[int, Generation | Exception]
"""Number of a request, and what the engine returned or raised."""


class Mailbox:
    """The requests of one episode worker to one engine: an `Engine` for the sessions of the worker.

    All methods run in the event loop of the worker.

    Args:
        name: name of the engine, for messages.
        is_open: whether the engine accepts requests; False: after `reopen`.
    """

    def __init__(self, name: str, *, is_open: bool = True) -> None:
        self._name = name
        self._ids = itertools.count()
        self._new: list[Request] = []
        self._cancelled: list[int] = []
        self._waiting: dict[int, asyncio.Future[Generation]] = {}
        self._has_mail = asyncio.Event()
        self._failure = None if is_open else f"{name} has not started"

    async def generate(self, token_ids: Sequence[int], sampling: SamplingParams, *, session_id: str) -> Generation:
        """Sample one continuation; see `Engine.generate`."""
        if self._failure is not None:
            raise EngineClosedError(self._failure)
        request = Request(id=next(self._ids), token_ids=token_ids, sampling=sampling, session_id=session_id)
        future = asyncio.get_running_loop().create_future()
        self._waiting[request.id] = future
        self._new.append(request)
        self._has_mail.set()
        try:
            return await future
        finally:
            if self._waiting.pop(request.id, None) is not None:  # cancelled
                self._cancelled.append(request.id)
                self._has_mail.set()

    def __str__(self) -> str:
        """Return the number of requests that wait for the engine, and of those that it has not fetched."""
        return f"{len(self._waiting)} requests wait for {self._name}, which has not fetched {len(self._new)} of them"

    async def take(self) -> tuple[list[Request], list[int]]:
        """Wait for new or cancelled requests, and return them; the engine calls it.

        A call of an engine that is not open returns as well, so that it does not take requests to the restarted one.
        """
        if self._failure is None:
            await self._has_mail.wait()
        self._has_mail.clear()
        cancelled, self._cancelled = self._cancelled, []
        new, self._new = [request for request in self._new if request.id not in cancelled], []
        return new, cancelled

    def give(self, results: Sequence[Result]) -> None:
        """Deliver results; the engine calls it. Results of cancelled requests are ignored."""
        for number, result in results:
            future = self._waiting.pop(number, None)
            if future is None or future.done():  # cancelled: a while ago, or just now
                continue
            if isinstance(result, Exception):
                future.set_exception(result)
            else:
                future.set_result(result)

    def fail(self, reason: str) -> None:
        """Fail all waiting requests and those to come: the engine has stopped."""
        self._failure = f"{self._name} has stopped: {reason}"
        self._new, self._cancelled = [], []
        self._has_mail.set()
        waiting, self._waiting = self._waiting, {}
        for future in waiting.values():
            if not future.done():
                future.set_exception(EngineDiedError(self._failure))

    def reopen(self) -> bool:
        """Accept requests: the engine has started, for the first time or again. Return whether it was not open."""
        was_closed, self._failure = self._failure is not None, None
        return was_closed

    async def drained(self) -> None:
        """Wait until the engine has answered all requests."""
        while self._waiting:
            await asyncio.wait(self._waiting.values())


async def serve(engine: Engine, worker: Any, number: int) -> None:
    """Run the requests of one episode worker on an engine until the worker is gone. Runs in the process of the engine.

    Args:
        engine: the engine.
        worker: handle of the worker's actor, whose async methods `take(number)`, `give(number, results)` and
            `fail(number, reason)` are those of its `Mailbox` for this engine.
        number: number of the engine.
    """
    tasks: dict[int, asyncio.Task[None]] = {}
    results: list[Result] = []
    has_results = asyncio.Event()

    async def run(request: Request) -> None:
        try:
            result = await engine.generate(request.token_ids, request.sampling, session_id=request.session_id)
        except Exception as error:  # noqa: BLE001 - sent to the worker, which raises it
            result = error
        finally:
            del tasks[request.id]
        results.append((request.id, result))
        has_results.set()

    async def deliver() -> None:
        while True:
            await has_results.wait()
            has_results.clear()
            ready = list(results)
            results.clear()
            await worker.give.remote(number, ready)

    async def take() -> tuple[list[Request], list[int]]:
        return await worker.take.remote(number)

    delivery, mail = asyncio.create_task(deliver()), asyncio.create_task(take())
    try:
        while True:
            await asyncio.wait((delivery, mail), return_when=asyncio.FIRST_COMPLETED)
            if delivery.done():
                await delivery  # raises
            (new, cancelled), mail = await mail, asyncio.create_task(take())
            for request in new:
                tasks[request.id] = asyncio.create_task(run(request))
            for request_id in cancelled:
                if request_id in tasks:
                    tasks[request_id].cancel()
    except RayActorError:
        return  # the worker is gone, and its requests with it
    except Exception as error:
        worker.fail.remote(number, f"{type(error).__name__}: {error}")
        raise
    finally:
        for task in (delivery, mail, *tasks.values()):
            task.cancel()
