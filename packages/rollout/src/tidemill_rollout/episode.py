"""An episode: a function that solves a problem through a session, and how it is found and run."""

import asyncio
import importlib
import importlib.util
import inspect
import sys
import time
import traceback
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, cast

from tidemill_rollout.errors import LimitError, ModelError
from tidemill_rollout.outcome import Outcome, to_outcome
from tidemill_rollout.problem import Problem
from tidemill_rollout.session import Reply, Session
from tidemill_rollout.trajectory import Trajectory

EpisodeFn = Callable[[Problem, Any], Awaitable[float | dict[str, Any] | Outcome] | float | dict[str, Any] | Outcome]
"""`async def episode(problem, session)`, or a function without `async`, which receives a `BlockingSession`."""

_episodes: dict[str, EpisodeFn] = {}


def register_episode(name: str) -> Callable[[EpisodeFn], EpisodeFn]:
    """Register the decorated function under a name.

    Raises:
        ValueError: the name is registered already.
    """

    def decorate(function: EpisodeFn) -> EpisodeFn:
        if name in _episodes:
            raise ValueError(f"the episode {name!r} is registered already; choose another name")
        _episodes[name] = function
        return function

    return decorate


def load_episode(name: str) -> EpisodeFn:
    """Return an episode function by registered name, "pkg.mod:attr" or "path/file.py:attr".

    Raises:
        ValueError: there is no such function; the message names file and function.
        ImportError: its module cannot be imported.
    """
    if name in _episodes:
        return _episodes[name]
    target, colon, attribute = name.rpartition(":")
    if not colon:
        known = ", ".join(sorted(_episodes)) or "none"
        raise ValueError(
            f'expected a registered episode ({known}), "pkg.mod:attr" or "path/file.py:attr", got {name!r}'
        )
    if target.endswith(".py") and not Path(target).is_file():
        raise ValueError(f"the file {Path(target).absolute()} does not exist; check the path in {name!r}")
    try:
        module = _import_file(Path(target)) if target.endswith(".py") else importlib.import_module(target)
    except (Exception, SystemExit) as error:
        raise ImportError(
            f"cannot import {target!r} for the episode {name!r}: {type(error).__name__}: {error}"
        ) from error
    function: Any = getattr(module, attribute, None)
    if not callable(function):
        raise ValueError(f"{target} has no function {attribute!r}; define it, or correct the name after the colon")
    return cast(EpisodeFn, function)


def _import_file(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"tidemill_episode_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # the dataclass decorator looks its module up
    spec.loader.exec_module(module)
    return module


@dataclass(frozen=True, kw_only=True, slots=True)
class EpisodeResult:
    """A finished episode.

    Attributes:
        problem: the problem.
        outcome: how it ended, with the reward.
        trajectories: training rows; empty if nothing was generated.
        metrics: counts of the session (see `Session.metrics`).
        seconds: duration.
    """

    problem: Problem
    outcome: Outcome
    trajectories: list[Trajectory]
    metrics: dict[str, float]
    seconds: float


class BlockingSession:
    """The session of an episode function without `async`: the same calls, which wait for their result."""

    def __init__(self, session: Session, loop: asyncio.AbstractEventLoop) -> None:
        self._session = session
        self._loop = loop
        self.id, self.seed = session.id, session.seed
        self.base_url, self.api_key = session.base_url, session.api_key

    def generate(self, *args: Any, **kwargs: Any) -> Reply:
        """Generate a reply; see `Session.generate`."""
        return asyncio.run_coroutine_threadsafe(self._session.generate(*args, **kwargs), self._loop).result()

    def branch(self, name: str | None = None, *, is_trained: bool = True) -> "BlockingSession":
        """Return a session with a history of its own; see `Session.branch`."""
        return BlockingSession(self._session.branch(name, is_trained=is_trained), self._loop)


async def run_episode(
    function: EpisodeFn, problem: Problem, session: Session, *, timeout_s: float = float("inf")
) -> EpisodeResult:
    """Run an episode to its end and return what it is worth. Exceptions of the episode become outcomes.

    A function without `async` runs in a thread; one that never returns keeps that thread until the process ends.

    Args:
        function: the episode.
        problem: the problem.
        session: a new session, which has ended afterwards.
        timeout_s: time limit of the episode.
    """
    start = time.monotonic()
    try:
        async with asyncio.timeout(None if timeout_s == float("inf") else timeout_s):
            outcome = await _call(function, problem, session)
    except TimeoutError:
        outcome = _truncated("time", f"no result within {timeout_s:g} s")
    finally:
        await session.end()
    return EpisodeResult(
        problem=problem,
        outcome=outcome,
        trajectories=session.trajectories(),
        metrics=session.metrics(),
        seconds=time.monotonic() - start,
    )


async def _call(function: EpisodeFn, problem: Problem, session: Session) -> Outcome:
    try:
        if _is_async(function):
            result = await function(problem, session)  # type: ignore[misc]
        else:
            blocking = BlockingSession(session, asyncio.get_running_loop())
            result = await asyncio.to_thread(function, problem, blocking)
        return to_outcome(result)
    except LimitError as error:
        return _truncated(error.limit, str(error))
    except ModelError as error:
        return Outcome(reward=0.0, status="model_error", reason=f"model: {error}")
    except BaseException as error:  # including SystemExit, because user code may call exit()
        if isinstance(error, asyncio.CancelledError | KeyboardInterrupt):
            raise
        return _failed(error)


def _is_async(function: EpisodeFn) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def _truncated(limit: str, message: str) -> Outcome:
    return Outcome(reward=0.0, status="truncated", reason=f"{limit}: {message}")


def _failed(error: BaseException) -> Outcome:
    frames = traceback.extract_tb(error.__traceback__)
    place = f" at {Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else ""
    return Outcome(reward=0.0, status="environment_error", reason=f"{type(error).__name__}: {error}{place}"[:2000])
