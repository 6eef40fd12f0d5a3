"""An episode: a function that solves a problem through a session, and how it is found and run."""

import asyncio
import copy
import math
import os
import sysconfig
import time
import traceback
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tidemill_rollout.blocking import BlockingSession
from tidemill_rollout.errors import LimitError, ModelError
from tidemill_rollout.outcome import Outcome, to_outcome, truncated
from tidemill_rollout.problem import Problem
from tidemill_rollout.registry import Registry
from tidemill_rollout.session import CANCEL_GRACE_S, Session
from tidemill_rollout.thread import is_async, run_in_thread
from tidemill_rollout.trajectory import Trajectory

EpisodeFn = Callable[[Problem, Any], Awaitable[float | dict[str, Any] | Outcome] | float | dict[str, Any] | Outcome]
"""`async def episode(problem, session)`, or a function without `async`, which receives a `BlockingSession`."""

_MAX_REASON = 2000
_LEAST_WAIT_S = 0.05
"""Seconds between two looks at a clock that stands still just before the limit."""
_PACKAGE = Path(__file__).parent
_LIBRARIES = {Path(path) for path in map(sysconfig.get_path, ("stdlib", "platstdlib", "purelib", "platlib"))}
_episodes: Registry[EpisodeFn] = Registry("episode")


def register_episode(name: str) -> Callable[[EpisodeFn], EpisodeFn]:
    """Register the decorated function; see `Registry.register`."""
    return _episodes.register(name)


def load_episode(name: str) -> EpisodeFn:
    """Return an episode function by registered name, "pkg.mod:attr" or "path/file.py:attr"; see `Registry.load`."""
    return _episodes.load(name)


@dataclass(frozen=True, kw_only=True, slots=True)
class EpisodeResult:
    """A finished episode.

    Attributes:
        problem: the problem.
        outcome: how it ended, with the reward.
        trajectories: training rows; empty if nothing was generated.
        metrics: counts of the session (see `Session.metrics`).
        seconds: duration, by the clock of `run_episode`.
    """

    problem: Problem
    outcome: Outcome
    trajectories: list[Trajectory]
    metrics: dict[str, float]
    seconds: float


async def run_episode(
    function: EpisodeFn,
    problem: Problem,
    session: Session,
    *,
    timeout_s: float = math.inf,
    clock: Callable[[], float] = time.monotonic,
) -> EpisodeResult:
    """Run an episode to its end and return what it is worth. Exceptions of the episode become outcomes.

    The episode runs in a task with the name of its session; at the time limit and when the caller is cancelled, so is
    that task. A function without `async` runs in a thread of that name; one that never returns keeps that thread until
    the process ends. An `async` function that blocks without `await` stops all episodes of its event loop.

    Args:
        function: the episode.
        problem: the problem. The episode gets a copy, which it may change: other episodes have the same problem.
        session: a new session, which has ended afterwards.
        timeout_s: time limit of the episode.
        clock: returns seconds, for the limit and the duration of the episode; it may stand still for a while.
    """
    start = clock()
    task = asyncio.create_task(_outcome(function, problem, session), name=session.id)
    try:
        while not task.done() and (left := start + timeout_s - clock()) > 0:
            await asyncio.wait({task}, timeout=None if math.isinf(left) else max(left, _LEAST_WAIT_S))
        is_finished = task.done()
    finally:
        try:
            if not task.done():
                task.cancel()
                await asyncio.wait({task}, timeout=CANCEL_GRACE_S)
        finally:
            await session.end()
    if not is_finished:
        outcome = truncated("time", f"no result within {timeout_s:g} s")
    elif task.cancelled():
        reason = "CancelledError: the episode has cancelled its own task"
        outcome = Outcome(reward=0.0, status="environment_error", reason=reason)
    else:
        outcome = task.result()
    trajectories = session.trajectories()
    return EpisodeResult(
        problem=problem,
        outcome=outcome,
        trajectories=trajectories,
        metrics=session.metrics(trajectories),
        seconds=clock() - start,
    )


async def _outcome(function: EpisodeFn, problem: Problem, session: Session) -> Outcome:
    process = os.getpid()
    try:
        problem = copy.deepcopy(problem)
        if is_async(function):
            result = await function(problem, session)  # type: ignore[misc]
        else:
            result = await run_in_thread(function, problem, BlockingSession(session, asyncio.get_running_loop()))
        return to_outcome(result)
    except BaseException as error:  # including SystemExit, because user code may call exit()
        task = asyncio.current_task()
        assert task is not None
        if isinstance(error, KeyboardInterrupt) or (isinstance(error, asyncio.CancelledError) and task.cancelling()):
            raise
        outcome = _outcome_of_error(error, function)
        if outcome.status == "environment_error" and (limit := session.limit_of(outcome.reason)) is not None:
            return truncated(limit.limit, f"{limit}; then {outcome.reason}"[:_MAX_REASON])
        return outcome
    finally:
        if os.getpid() != process:
            os._exit(1)  # a child that the episode has forked must not continue with the other episodes


def _outcome_of_error(error: BaseException, function: EpisodeFn) -> Outcome:
    causes = _causes(error)
    if all(isinstance(cause, LimitError) for cause in causes):
        return truncated(causes[0].limit, str(causes[0]))  # type: ignore[attr-defined]
    if all(isinstance(cause, LimitError | ModelError) for cause in causes):
        cause = next(cause for cause in causes if isinstance(cause, ModelError))
        return Outcome(reward=0.0, status="model_error", reason=f"model: {cause}"[:_MAX_REASON])
    cause = next(cause for cause in causes if not isinstance(cause, LimitError | ModelError))
    try:
        message = str(cause)
    except Exception:  # noqa: BLE001 - code of the user
        message = "(its text cannot be formed)"
    reason = f"{type(cause).__name__}: {message}"[:_MAX_REASON]
    return Outcome(reward=0.0, status="environment_error", reason=f"{reason} (in {_place(cause, function)})")


def _causes(error: BaseException) -> list[BaseException]:
    """Return the errors of a group, such as a `TaskGroup` raises, or the error itself."""
    if isinstance(error, BaseExceptionGroup):
        return [cause for member in error.exceptions for cause in _causes(member)]
    if isinstance(error, RuntimeError) and isinstance(error.__cause__, StopIteration | StopAsyncIteration):
        return [error.__cause__]  # Python replaces these where they leave a coroutine
    if isinstance(error.__cause__, LimitError) and not isinstance(error, ModelError):
        return [error.__cause__]  # raised `from` the limit
    return [error]


def _place(error: BaseException, function: EpisodeFn) -> str:
    """Return file and line of the last code outside this package that the error passed, of the user's own code if it
    passed any; or else the function's name.
    """
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith("<") and not Path(frame.filename).is_relative_to(_PACKAGE)
    ]
    own = [frame for frame in frames if not any(map(Path(frame.filename).is_relative_to, _LIBRARIES))]
    if frames:
        last = (own or frames)[-1]
        return f"{Path(last.filename).name}:{last.lineno}"
    return name_of(function)


def name_of(function: Callable[..., Any]) -> str:
    """Return the name of a function, or of the class of another callable object."""
    return str(getattr(function, "__qualname__", type(function).__qualname__))
