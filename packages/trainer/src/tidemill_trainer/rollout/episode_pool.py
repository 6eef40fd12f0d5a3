"""The processes that run episodes."""

import re
import time
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import numpy as np
import ray
import torch
from ray.exceptions import RayActorError, RayTaskError
from tidemill_dataproto import DataProto
from tidemill_rollout import Outcome

from tidemill_trainer.config import Config
from tidemill_trainer.config_file import ConfigError
from tidemill_trainer.progress import Progress
from tidemill_trainer.rollout.engines import Engines
from tidemill_trainer.rollout.episode_task import EpisodePart, Episodes, EpisodeSummary, EpisodeTask, Failure
from tidemill_trainer.rollout.episode_worker import PART_INTERVAL_S, EpisodeWorker
from tidemill_trainer.stalls.watch import Watch

_START_S = 300.0
_CHECK_S = 5.0
_BLOCKED_S = 60.0
_MAX_LOADS = 3
_GIL_HOLDER = re.compile(r'\(active\+gil\): "([^"]*)"')


@dataclass(kw_only=True, slots=True)
class _Batch:
    """Episodes that one worker runs at the same time.

    Attributes:
        worker: number of the worker.
        actor: its actor; another one if the worker has been replaced.
        tasks: episodes without a summary, by number.
        last_part_s: when the worker last returned a part, on the monotonic clock.
        num_generated: tokens that the engines returned for unfinished episodes.
        culprit: the episode that blocks the worker, if that is known.
    """

    worker: int
    actor: Any
    tasks: dict[int, EpisodeTask]
    num_generated: int = 0
    culprit: EpisodeTask | None = None
    last_part_s: float = field(default_factory=time.monotonic)


@dataclass(kw_only=True, slots=True)
class Running:
    """Episodes that run, and what is known about them so far. `EpisodePool.wait` returns the result.

    Attributes:
        greedy: decode greedily.
        waiting: episodes that have not started, in groups for one worker each.
        idle: numbers of the workers that run none of these episodes.
        batches: episodes that run, by the stream of their parts.
        parts: finished episodes.
        crashes: how often workers died of each episode.
        num_restarts, num_lost: as in `Episodes`.
    """

    greedy: bool
    waiting: deque[list[EpisodeTask]]
    idle: list[int]
    batches: dict[Any, _Batch] = field(default_factory=dict)
    parts: list[EpisodePart] = field(default_factory=list)
    crashes: dict[int, list[Failure]] = field(default_factory=lambda: defaultdict(list))
    num_restarts: int = 0
    num_lost: int = 0


class EpisodePool:
    """Run episodes in worker processes. The death of a process affects only the episodes that it was running.

    Nobody can say which of them killed it. So each half of them runs in a process of its own, again and again, until
    the one remains that kills its process alone. Of a process that is blocked, the stack trace may name the episode.

    Args:
        num_workers: number of processes.
        engines: engines of the run. They must have started before `load`.
        log_dir: folder for the logs of the processes.
        progress: terminal output.
        watch: writes a report about a worker that is blocked before the worker is replaced.

    Attributes:
        meanwhile: called every few seconds while the driver waits for episodes; None: nothing is.
    """

    def __init__(self, num_workers: int, engines: Engines, log_dir: str, progress: Progress, watch: Watch) -> None:
        self._engines = engines
        self._log_dir = log_dir
        self._progress = progress
        self._watch = watch
        self._config: Config | None = None
        self._checked_s = time.monotonic()
        self.meanwhile: Callable[[], None] | None = None
        self.workers: list[Any] = [self._start(number) for number in range(num_workers)]

    def load(self, config: Config) -> None:
        """Connect the workers with the engines, and load the user's functions of a configuration.

        Raises:
            ConfigError: a function cannot be loaded by a worker.
        """
        is_connected = self._config is not None
        self._config = config
        if not is_connected:
            self._engines.serve(self.workers)
        self._load(range(len(self.workers)))

    def release(self) -> None:
        """In turns, interrupt all requests and free the memory of the engines. The time of episodes stands still."""
        self._set_clocks(runs=False)
        self._engines.release()

    def resume(self) -> None:
        """In turns, continue what `release` interrupted (see `Engines.resume`)."""
        self._engines.resume()
        self._set_clocks(runs=True)

    def _set_clocks(self, *, runs: bool) -> None:
        if self._engines.in_turns:
            for worker in self.workers:
                worker.set_clock.remote(runs=runs)

    def start(self, tasks: Sequence[EpisodeTask], *, greedy: bool, finished: Episodes | None = None) -> Running:
        """Start episodes, at the same time as those that run already.

        Args:
            tasks: episodes with different numbers.
            greedy: decode greedily, for validation.
            finished: those of the episodes that are not run, because an earlier process did (see `collect`).
        """
        self.resume()
        done = set() if finished is None else {summary.task.number for summary in finished.summaries}
        tasks = [task for task in tasks if task.number not in done]
        shares = np.array_split(np.arange(len(tasks)), len(self.workers))
        waiting = deque([tasks[index] for index in share] for share in shares if len(share) > 0)
        running = Running(greedy=greedy, waiting=waiting, idle=list(range(len(self.workers))))
        if finished is not None:
            num_tokens = finished.num_generated
            running.parts.append(
                EpisodePart(rows=finished.rows, summaries=finished.summaries, num_generated=num_tokens)
            )
            running.num_restarts, running.num_lost = finished.num_restarts, finished.num_lost
        self._start_waiting(running)
        return running

    def wait(self, running: Running) -> Episodes:
        """Wait for the end of episodes.

        Raises:
            WorkerDiedError: engines died more often than `rollout.max_restarts`.
        """
        self.resume()
        try:
            while running.batches:
                self._advance(running, self._ready(running.batches))
        finally:
            for stream in running.batches:  # after an error; a later call must not meet these episodes
                ray.cancel(stream)
        return _joined(running.parts, running.num_restarts, running.num_lost)

    def collect(self, running: Running) -> Episodes:
        """Return the episodes that have finished so far, without waiting for the others, which run on.

        Tokens of the others are not counted in `num_generated`.
        """
        while streams := list(running.batches):
            ready, _ = ray.wait(streams, num_returns=len(streams), timeout=0)
            if not ready:
                break
            self._advance(running, ready)
        found = _joined(running.parts, running.num_restarts, running.num_lost)
        num_tokens = sum(summary.num_tokens for summary in found.summaries)
        return replace(found, num_generated=num_tokens + found.num_lost)

    def _advance(self, running: Running, ready: Sequence[Any]) -> None:
        """Receive a part of each of these streams, and start what can start then."""
        for stream in ready:
            batch = running.batches[stream]
            reason = self._receive(stream, batch, running.parts)
            if reason is None:
                continue
            del running.batches[stream]
            running.idle.append(batch.worker)
            if batch.tasks:
                running.num_restarts += 1
                running.num_lost += batch.num_generated
                self._restart(batch, reason)
                running.waiting.extendleft(self._repeated(batch, reason, running.crashes, running.parts))
        self._start_waiting(running)

    def _start_waiting(self, running: Running) -> None:
        while running.waiting and running.idle:
            number = running.idle.pop(0)
            tasks = {task.number: task for task in running.waiting.popleft()}
            worker = self.workers[number]
            stream = worker.run.remote(list(tasks.values()), greedy=running.greedy)
            running.batches[stream] = _Batch(worker=number, actor=worker, tasks=tasks)

    def shutdown(self) -> None:
        """End all processes."""
        for worker in self.workers:
            ray.kill(worker)

    def _start(self, number: int) -> Any:
        options = {"num_cpus": 1, "max_concurrency": 10_000, "scheduling_strategy": "SPREAD"}
        worker = ray.remote(EpisodeWorker).options(**options)
        return worker.remote(number, self._engines.numbers(), self._log_dir)

    def _load(self, numbers: Sequence[int]) -> None:
        """Load the user's functions in workers. One that dies meanwhile, such as with its node, is replaced.

        Raises:
            ConfigError: a function cannot be loaded.
            RuntimeError: workers died in each of the attempts.
            TimeoutError: workers do not start, perhaps because the cluster has no room for them.
            WorkerDiedError: a training worker has died meanwhile.
        """
        for _ in range(_MAX_LOADS):
            calls = {number: self.workers[number].load.remote(self._config) for number in numbers}
            self._wait_for_loads(calls)
            numbers = [number for number, call in calls.items() if not _loaded(call)]
            for number in numbers:
                log = f"{self._log_dir}/episodes_{number}.log"
                self._progress.warn(f"episode worker {number} died while it loaded the user's functions; see {log}")
                self._replace(number)
            if not numbers:
                return
        raise RuntimeError(
            f"episode workers died in each of {_MAX_LOADS} attempts to load the user's functions; see "
            f"{self._log_dir}/episodes_*.log"
        )

    def _wait_for_loads(self, calls: Mapping[int, Any]) -> None:
        """Wait until workers have loaded the user's functions, or have died."""
        deadline, left = time.monotonic() + _START_S, list(calls.values())
        while left := ray.wait(left, num_returns=len(left), timeout=_CHECK_S)[1]:
            self._engines.check_policy()  # its node may have been that of the worker, and no other one has room
            if time.monotonic() > deadline:
                numbers = ", ".join(str(number) for number, call in calls.items() if call in left)
                raise TimeoutError(
                    f"episode worker {numbers} did not start within {_START_S:g} s; the cluster may have no CPU for "
                    f"it, or see {self._log_dir}/episodes_*.log"
                )

    def _ready(self, running: Mapping[Any, _Batch]) -> list[Any]:
        """Wait for a part and return the streams that have one, or whose worker is gone or blocked."""
        ready, _ = ray.wait(list(running), num_returns=1, timeout=2 * PART_INTERVAL_S)
        now = time.monotonic()
        if not ready or now - self._checked_s > 2 * PART_INTERVAL_S:
            self._engines.poll()
            if self.meanwhile is not None:
                self.meanwhile()
            self._checked_s = now
        late = [stream for stream, batch in running.items() if now - batch.last_part_s > _BLOCKED_S]
        return ready + [stream for stream in late if stream not in ready]

    def _receive(self, stream: Any, batch: _Batch, parts: list[EpisodePart]) -> str | None:
        """Receive a part. Return None, "" after the last part, or why there will be none."""
        # Parts also wait while the driver replaces another worker, for longer than a worker may be silent.
        if time.monotonic() - batch.last_part_s > _BLOCKED_S and not ray.wait([stream], timeout=PART_INTERVAL_S)[0]:
            return self._blocked(batch)
        try:
            part = cast(EpisodePart, ray.get(next(stream)))
        except StopIteration:
            return ""
        except RayActorError:
            return f"episode worker {batch.worker} died; see {self._log_dir}/episodes_{batch.worker}.log"
        parts.append(part)
        batch.last_part_s = time.monotonic()
        batch.num_generated += part.num_generated
        for summary in part.summaries:
            batch.num_generated -= summary.num_tokens
            del batch.tasks[summary.task.number]
        return None

    def _blocked(self, batch: _Batch) -> str:
        """Return why a worker does not respond, and note the episode whose thread holds its interpreter."""
        self._progress.warn(self._watch.write(f"episode worker {batch.worker} did not respond"))
        holder = _GIL_HOLDER.search(self._watch.stack_trace(f"episodes_{batch.worker}"))
        name = "" if holder is None else holder[1]
        batch.culprit = next((task for task in batch.tasks.values() if name.startswith(f"{task.name}/")), None)
        what = (
            "an `async` episode blocks its event loop, or compiled code holds the interpreter"
            if batch.culprit is None
            else f"compiled code, such as a regular expression, of episode {batch.culprit.name} holds the interpreter"
        )
        return f"episode worker {batch.worker} did not respond for {_BLOCKED_S:g} s: {what}"

    def _restart(self, batch: _Batch, reason: str) -> None:
        """Replace a worker that died or is blocked, unless that has happened for other episodes that it was running."""
        self._progress.warn(f"{reason}; {len(batch.tasks)} episodes that it was running are repeated")
        if self.workers[batch.worker] is not batch.actor:
            return
        ray.kill(self.workers[batch.worker])
        self._replace(batch.worker)
        self._load([batch.worker])

    def _replace(self, number: int) -> None:
        worker = self.workers[number] = self._start(number)
        self._engines.serve([worker])

    def _repeated(
        self, batch: _Batch, reason: str, crashes: dict[int, list[Failure]], parts: list[EpisodePart]
    ) -> list[list[EpisodeTask]]:
        """Return the unfinished episodes of a lost worker, in groups for one process each."""
        assert self._config is not None
        tasks = list(batch.tasks.values())
        if len(tasks) > 1:
            if batch.culprit is not None:
                return [[batch.culprit], [task for task in tasks if task is not batch.culprit]]
            half = len(tasks) // 2
            return [tasks[:half], tasks[half:]]
        [task] = tasks
        failures = crashes[task.number]
        failures.append(Failure(reason=f"died: {reason}", num_tokens=0))
        if len(failures) <= self._config.episode.max_retries:
            return [tasks]
        outcome = Outcome(reward=0.0, status="environment_error", reason=failures[-1].reason)
        summary = EpisodeSummary(task=task, outcome=outcome, failures=failures)
        parts.append(EpisodePart(rows=None, summaries=[summary], num_generated=0))
        return []


def _loaded(call: Any) -> bool:
    """Return whether a worker has loaded the user's functions; False: it died."""
    try:
        ray.get(call, timeout=0)
    except RayTaskError as error:
        if isinstance(error.cause, ConfigError):
            raise error.cause from None
        raise
    except RayActorError:
        return False
    return True


def _joined(parts: Sequence[EpisodePart], num_restarts: int, num_lost: int) -> Episodes:
    rows = [part.rows for part in parts if part.rows is not None]
    joined = DataProto.concat(rows) if rows else None
    if joined is not None and not bool((joined["episode"].diff() >= 0).all()):
        joined = joined[torch.argsort(joined["episode"], stable=True)]
    return Episodes(
        rows=joined,
        summaries=sorted((summary for part in parts for summary in part.summaries), key=lambda each: each.task.number),
        num_generated=sum(part.num_generated for part in parts),
        num_lost=num_lost,
        num_restarts=num_restarts,
    )
