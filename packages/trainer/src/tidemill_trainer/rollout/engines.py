"""The engines of a run, of which each one that dies is replaced. Engines can be added and removed while it runs."""

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import ray
from ray.exceptions import RayActorError, RayTaskError
from tidemill_dispatch import WorkerDiedError, WorkerError
from tidemill_dispatch.ray import CallFuture, RayWorkerGroup, dead_workers

from tidemill_trainer.config import Config
from tidemill_trainer.gpus import Gpu
from tidemill_trainer.progress import Progress
from tidemill_trainer.rollout.client import RayEngine
from tidemill_trainer.rollout.engine import Engine, wait_for
from tidemill_trainer.rollout.engine_requests import EngineRequest, EngineRequestError
from tidemill_trainer.timing import Seconds

T = TypeVar("T")
_CHECK_S = 5.0


class Engines:
    """Start the engines, keep their weights equal to those of the policy, and replace engines that die.

    Requests to an engine that died are sent to others; where there is none, they wait. A restarted engine receives
    requests after its weights have been updated and verified, and so does one that is added. An engine that is removed
    first answers the requests that it has. The driver notices deaths in `poll` and in the calls of all engines.

    In turns with the training workers (`placement.engines`), the engines have their weights from `update_weights` to
    `release`, and their KV pool from `resume` to `release`. Requests wait in between. On a CPU nothing is freed.

    Args:
        start_process: starts the process of an engine, a group of one `RolloutWorker`, by its number. Raises
            RuntimeError if its resources are not free.
        config: configuration of the run, `placed`.
        progress: terminal output.
        log_dir: folder with the logs of the engines.

    Attributes:
        in_turns: whether they use the GPUs of the training workers in turns.
        num_restarts: engines that were started again since the start of the run.
        num_added: engines that were added since the start of the run, and have served.
        version: weight version of all engines that serve; None before the first update.
    """

    def __init__(
        self, start_process: Callable[[int], RayWorkerGroup], config: Config, progress: Progress, log_dir: str
    ) -> None:
        self._start_process = start_process
        self._config = config
        self._progress = progress
        self._log_dir = log_dir
        self._engines: dict[int, Engine] = {}
        self._next_number = config.rollout.num_engines
        self._accepted: deque[EngineRequest] = deque()
        self._policy: RayWorkerGroup | None = None
        self._connected: list[int] = []
        self._episode_workers: list[Any] = []
        self._gpus: Sequence[Gpu | None] = ()
        self.in_turns = config.placement.engines == "turns"
        self._has_weights = self._serves = True
        self.version: int | str | None = None
        self._seconds = Seconds()
        self.num_restarts = self.num_added = 0

    def start_processes(self) -> None:
        """Start the processes of `rollout.num_engines` engines."""
        for number in range(self._next_number):
            self._engines[number] = Engine(number=number, group=self._start_process(number))

    def all(self) -> list[Engine]:
        """Return all engines. Another thread may call it."""
        return list(self._engines.values())

    def numbers(self) -> list[int]:
        """Return the numbers of the engines to which episode workers send requests."""
        return [engine.number for engine in self.all() if not engine.is_new and engine.drains is None]

    @property
    def workers(self) -> Mapping[int, Any]:
        """Handles of the actors, by number."""
        return {engine.number: engine.worker for engine in self.all()}

    def start(self, gpus: Sequence[Gpu | None] = ()) -> list[CallFuture]:
        """Start SGLang in all processes; the futures wait until they serve.

        Args:
            gpus: in turns, the GPUs of the training workers by rank.
        """
        self._gpus = gpus
        return [engine.group.start_engine(gpus) for engine in self.all()]

    def connect(self, policy: RayWorkerGroup) -> None:
        """Connect with the training workers that have the weights.

        Args:
            policy: the group of `ActorWorker`s.
        """
        self._policy = policy
        engines = self._serving()
        self._connected = [engine.number for engine in engines]
        hosts = policy.hosts()
        nodes = {host.node_id for host in [*hosts, *(engine.group.hosts()[0] for engine in engines)]}
        policy.connect_engines(
            [
                RayEngine(
                    engine.worker,
                    engine.name,
                    tp_size=self._config.rollout.tensor_parallel_size,
                    timeout_s=self._config.weight_update.timeout_s,
                )
                for engine in engines
            ],
            None if len(nodes) == 1 else hosts[0].node_ip,
        )

    def serve(self, episode_workers: Sequence[Any]) -> None:
        """Run the requests of further episode workers.

        Args:
            episode_workers: handles of their actors. Those that have died are ignored.

        Raises:
            WorkerDiedError: as `poll`, or a training worker has died, perhaps with an episode worker.
        """
        self.check_policy()
        self._restart_dead()
        self._episode_workers += episode_workers
        ray.get([engine.worker.connect_episode_workers.remote(episode_workers) for engine in self._serving()])

    def update_weights(self, version: int | str) -> dict[str, float]:
        """Send the weights of the policy to all engines, including those that are being restarted.

        With `rollout.partial_rollout`, running requests are interrupted and continue afterwards; else they finish
        before.

        Args:
            version: weight version that the engines report afterwards.

        Returns:
            `weight_update/*` metrics, `rollout/num_engines` and `rollout/num_engine_restarts`; in turns also
            the seconds since the last call in which memory was freed and allocated, `rollout/{release,resume}_s`.

        Raises:
            WorkerError: an engine was not updated, although it is alive.
            WorkerDiedError: as `poll`.
        """
        policy = self._policy
        assert policy is not None, "call connect() first"
        self.version = version  # of the policy: an engine that is admitted meanwhile gets these weights
        if self.in_turns:
            policy.free_unused_memory()

        def update() -> dict[str, float]:
            if self.in_turns:
                wait_for(engine.group.resume_weights() for engine in self._serving())
            elif self._config.rollout.partial_rollout:
                wait_for(engine.group.interrupt() for engine in self._serving())
            metrics = policy.update_weights(version)[0]
            if self._config.rollout.partial_rollout and not self.in_turns:
                wait_for(engine.group.proceed() for engine in self._serving())
            return metrics

        metrics = self._on_all(update)
        self._has_weights = True
        return metrics | {
            **self._seconds.take(),
            "rollout/num_engines": float(len(self.numbers())),
            "rollout/num_engine_restarts": float(self.num_restarts),
        }

    def release(self) -> None:
        """In turns, interrupt all requests and free the memory of the engines for the training workers."""
        if self.in_turns:
            with self._seconds("rollout/release_s"):
                self._on_all(lambda: wait_for(engine.group.release() for engine in self._serving()))
            self._has_weights = self._serves = False

    def resume(self) -> None:
        """In turns, give the engines their memory and the weights of the last update, and continue all requests."""
        if self._serves:
            return
        if not self._has_weights:
            assert self.version is not None, "call update_weights() first"
            self.update_weights(self.version)
        assert self._policy is not None
        with self._seconds("rollout/resume_s"):
            self._policy.free_unused_memory()
            self._on_all(lambda: wait_for(engine.group.resume_serving() for engine in self._serving()))
        self._serves = True

    def _on_all(self, call: Callable[[], T]) -> T:
        """Call all engines, including those that are being restarted; again if one of them dies."""
        while True:
            self._wait_for_restarts()
            try:
                return call()
            except (WorkerError, WorkerDiedError):
                if not self._restart_dead():
                    raise

    def poll(self) -> None:
        """Restart engines that have died, let those serve that have started, and add and remove engines.

        Raises:
            WorkerDiedError: more engines died than `rollout.max_restarts`, one died again while it started, or a
                training worker has died with an engine, perhaps with their node.
        """
        while self._accepted:
            self._begin(self._accepted.popleft())
        self._restart_dead()
        for engine in self.all():
            if engine.started is not None and ray.wait([engine.started], timeout=0)[0]:
                self._admit(engine)
            elif engine.is_drained():
                self._remove(engine)

    def accept(self, request: EngineRequest) -> None:
        """Fulfil a request in the next `poll`. Another thread may call it.

        Raises:
            EngineRequestError: the request is refused.
        """
        self._chosen(request)
        self._accepted.append(request)

    def _chosen(self, request: EngineRequest) -> list[Engine]:
        """Return the engines that a request removes; nothing if it adds some.

        Raises:
            EngineRequestError: the request is refused.
        """
        if self.in_turns:
            raise EngineRequestError(
                'engines cannot be added or removed with placement.engines="turns", because they use the GPUs of the '
                "training workers; their number is rollout.num_engines when the run starts or resumes"
            )
        if request.action == "add":
            return []
        remaining = [engine for engine in self.all() if engine.drains is None]
        if request.name is None:
            found = remaining[-request.count :]
        else:
            found = [engine for engine in remaining if engine.name == request.name]
        names = ", ".join(engine.name for engine in remaining)
        if not found:
            raise EngineRequestError(f"the run has no engine {request.name!r} to remove; its engines are {names}")
        if not any(engine not in found and not engine.is_new for engine in remaining):
            raise EngineRequestError(
                f"cannot remove {request.name or request.count} of the engines {names}: the run requires one that "
                "serves; add one first"
            )
        return found

    def _begin(self, request: EngineRequest) -> None:
        """Start to fulfil a request."""
        try:
            chosen = self._chosen(request)
            if request.action == "add":
                self._add(request)
        except EngineRequestError as error:
            request.answer(str(error), status=1)
            return
        request.pending.update(engine.name for engine in chosen)
        for engine in chosen:
            if engine.started is None:
                engine.request = request
                engine.drains = [worker.drain.remote(engine.number) for worker in self._episode_workers]
                request.answer(f"{engine.name} receives no further requests and finishes those that it has")
            else:
                self._discard(engine, "it was removed before it served")
                request.settle(engine.name, f"{engine.name} was removed")

    def _add(self, request: EngineRequest) -> None:
        numbers = range(self._next_number, self._next_number + request.count)
        added: list[Engine] = []
        try:
            for number in numbers:
                added.append(Engine(number=number, group=self._start_process(number), is_new=True, request=request))
        except RuntimeError as error:
            for engine in added:
                engine.group.shutdown()
            raise EngineRequestError(str(error)) from error
        self._next_number = numbers.stop
        request.pending.update(engine.name for engine in added)
        for engine in added:
            engine.started = engine.worker.start_engine.remote(())
            self._engines[engine.number] = engine
            request.answer(f"{engine.name} starts")

    def _discard(self, engine: Engine, reason: str) -> None:
        """Remove an engine that does not serve."""
        self._take_out(engine)
        self._progress.warn(f"the run continues without {engine.name}: {reason}")
        if engine.is_new and engine.request is not None:
            engine.request.settle(engine.name, f"{engine.name}: {reason}", failed=True)

    def _remove(self, engine: Engine) -> None:
        """Remove an engine that has answered its requests, or has died; others repeat the rest of them."""
        self._take_out(engine)
        self._progress.info(f"{engine.name} was removed; engines: {len(self.numbers())}")
        assert engine.request is not None
        engine.request.settle(engine.name, f"{engine.name} was removed")

    def _take_out(self, engine: Engine) -> None:
        del self._engines[engine.number]
        if self._policy is not None and engine.number in self._connected:
            self.connect(self._policy)
        engine.group.shutdown()
        for worker in self._episode_workers:
            worker.close.remote(engine.number)

    def check_policy(self) -> None:
        """Raise WorkerDiedError if a training worker has died: then nothing else is replaced."""
        if self._policy is not None:
            self._policy.check_alive()

    def _restart_dead(self) -> bool:
        """Start engines again that have died; return whether there are any."""
        serving = self._serving()
        dead = [serving[position] for position in dead_workers([engine.worker for engine in serving])]
        if dead:
            self.check_policy()
        for engine in dead:
            if engine.drains is not None:
                self._remove(engine)
                continue
            if self.num_restarts >= self._config.rollout.max_restarts:
                engine.group.check_alive()  # raises
            self.num_restarts += 1
            reason = f"{engine.name} died"
            last_words = engine.last_words(self._log_dir)
            self._progress.warn(f"{reason} and is started again; its requests are repeated. {last_words}")
            for worker in self._episode_workers:
                worker.fail.remote(engine.number, reason)
            engine.restart(self._gpus)
        return bool(dead)

    def _wait_for_restarts(self) -> None:
        """Wait until all engines serve, except those that are being added.

        Raises:
            TimeoutError: one did not start within `rollout.timeout_s`.
            WorkerDiedError: as `poll`, or a training worker has died, perhaps with the node that the engine needs.
        """
        deadline = time.monotonic() + self._config.rollout.timeout_s
        self.poll()
        while starting := [engine for engine in self.all() if engine.started is not None and not engine.is_new]:
            ray.wait([engine.started for engine in starting], timeout=_CHECK_S)
            self.check_policy()
            self.poll()
            if time.monotonic() > deadline:
                names = ", ".join(engine.name for engine in starting)
                raise TimeoutError(
                    f"{names} did not start again within rollout.timeout_s = {self._config.rollout.timeout_s:g} s; the "
                    "cluster may have no room for them"
                )

    def _admit(self, engine: Engine) -> None:
        """Give an engine that has started the weights of the last update, and send it requests."""
        try:
            self._update_started(engine)
        except (RayTaskError, RayActorError, WorkerError) as error:
            cause = error.cause if isinstance(error, RayTaskError) else error
            last_words = engine.last_words(self._log_dir)
            if engine.is_new:
                self._discard(engine, f"could not be started: {str(cause).splitlines()[0]}. {last_words}")
                return
            if isinstance(error, RayTaskError):
                raise RuntimeError(f"{engine.name} could not be started again: {cause}. {last_words}") from error
            engine.group.check_alive()  # raises, if it has died
            raise
        for worker in self._episode_workers:
            worker.open.remote(engine.number)
        if engine.is_new:
            request, engine.request, engine.is_new = engine.request, None, False
            assert request is not None
            self.num_added += 1
            version = "" if self.version is None else f" with weight version {self.version}"
            self._progress.info(f"{engine.name} was added; engines: {len(self.numbers())}")
            request.settle(engine.name, f"{engine.name} serves{version}")

    def _update_started(self, engine: Engine) -> None:
        assert engine.started is not None
        ray.get(engine.started)  # raises, if it has failed
        engine.group.wait_ready()
        engine.started = None
        if self._policy is not None:
            self.connect(self._policy)
            if self.version is not None:
                self._policy.update_weights(self.version, [self._connected.index(engine.number)])
        ray.get(engine.worker.connect_episode_workers.remote(self._episode_workers))

    def _serving(self) -> list[Engine]:
        """Return the engines that have started, including those that finish their requests."""
        return [engine for engine in self.all() if engine.started is None]
