"""Functions with and without `async`, called from an event loop."""

import asyncio
import contextvars
import functools
import inspect
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

_Result = tuple[Any, BaseException | None]


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
    """Run a function in a thread of its own, named as the task that calls it, and return its result or raise its error.

    `asyncio.to_thread` is unsuitable for user code: it shares a few threads among all callers, so functions that never
    return stop everybody; the process waits for them at its end; and StopIteration is never delivered. A function that
    never returns keeps this thread, and nothing else, until the process ends. A thread costs about 0.1 ms.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[_Result] = loop.create_future()
    call = functools.partial(contextvars.copy_context().run, function, *args, **kwargs)

    process = os.getpid()

    def run() -> None:
        try:
            result = call(), None
        except BaseException as error:  # noqa: BLE001  # raised in the caller, including SystemExit
            result = None, error
        if os.getpid() != process:
            os._exit(1)  # a child that the function has forked; threads of libraries would keep it alive
        with suppress(RuntimeError):  # the event loop is closed, so nobody waits
            loop.call_soon_threadsafe(_resolve, future, result)

    task = asyncio.current_task()
    assert task is not None
    threading.Thread(target=run, name=task.get_name(), daemon=True).start()
    result, error = await future
    if error is not None:
        raise error
    return result


def _resolve(future: asyncio.Future[_Result], result: _Result) -> None:
    if not future.done():  # the caller may have been cancelled
        future.set_result(result)
