"""Functions with and without `async`, called from an event loop."""

import asyncio
import contextvars
import functools
import inspect
import threading
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue
from typing import Any

_Result = tuple[Any, BaseException | None]
_MAX_IDLE = 64


def is_async(function: Callable[..., Any]) -> bool:
    """Return whether a function, or the `__call__` of an object, is defined with `async def`."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


async def call(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a function and return its result: with `async` in the event loop, else in a thread."""
    if is_async(function):
        return await function(*args, **kwargs)
    result = await run_in_thread(function, *args, **kwargs)
    return await result if inspect.isawaitable(result) else result


async def run_in_thread(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run a function in a thread that nothing else uses meanwhile, and return its result or raise its error.

    `asyncio.to_thread` is unsuitable for user code: it shares a few threads among all callers, so functions that never
    return stop everybody; the process waits for them at its end; and StopIteration is never delivered. A function that
    never returns keeps this thread, and nothing else, until the process ends.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[_Result] = loop.create_future()
    call = functools.partial(contextvars.copy_context().run, function, *args, **kwargs)

    def deliver(result: _Result) -> None:
        with suppress(RuntimeError):  # the event loop is closed, so nobody waits
            loop.call_soon_threadsafe(_resolve, future, result)

    _idle_thread().calls.put((call, deliver))
    result, error = await future
    if error is not None:
        raise error
    return result


class _Thread(threading.Thread):
    """A thread that runs one call at a time. Starting a thread takes three times as long as reusing one."""

    def __init__(self) -> None:
        super().__init__(name="tidemill-call", daemon=True)
        self.calls: SimpleQueue[tuple[Callable[[], Any], Callable[[_Result], None]]] = SimpleQueue()

    def run(self) -> None:
        is_reused = True
        while is_reused:
            call, deliver = self.calls.get()
            try:
                result = call(), None
            except BaseException as error:  # noqa: BLE001  # raised in the caller, including SystemExit
                result = None, error
            is_reused = len(_idle) < _MAX_IDLE
            if is_reused:
                _idle.append(self)
            deliver(result)
            del call, deliver, result  # what they refer to must not live as long as the thread


_idle: list[_Thread] = []


def _idle_thread() -> _Thread:
    while _idle:
        thread = _idle.pop()
        if thread.is_alive():  # False in a forked process
            return thread
    thread = _Thread()
    thread.start()
    return thread


def _resolve(future: asyncio.Future[Any], result: _Result) -> None:
    if not future.done():  # the caller may have been cancelled
        future.set_result(result)
