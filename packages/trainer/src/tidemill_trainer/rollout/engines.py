"""The engines of a run, of which each one that dies is replaced."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import ray
from ray.exceptions import RayActorError, RayTaskError
from tidemill_dispatch import WorkerDiedError, WorkerError
from tidemill_dispatch.ray import CallFuture, RayWorkerGroup

from tidemill_trainer.config import Config
from tidemill_trainer.gpus import Gpu
from tidemill_trainer.progress import Progress
from tidemill_trainer.rollout.client import RayEngine

T = TypeVar("T")


class Engines:
    """Start the engines, keep their weights equal to those of the policy, and replace engines that die.

    Requests to an engine that died are sent to others; where there is none, they wait. A restarted engine receives
    requests after its weights have been updated and verified. The driver notices deaths in `poll` and in the calls of
    all engines.

    In turns with the training workers (`placement.engines`), the engines have their weights from `update_weights` to
    `release`, and their KV pool from `resume` to `release`. Requests wait in between. On a CPU nothing is freed.

    Args:
        group: the group of `RolloutWorker`s.
        config: configuration of the run, `placed`.
        progress: terminal output.

    Attributes:
        in_turns: whether they use the GPUs of the training workers in turns.
        num_restarts: engines that were started again since the start of the run.
    """

    def __init__(self, group: RayWorkerGroup, config: Config, progress: Progress) -> None:
        self._group = group
        self._config = config
        self._progress = progress
        self._policy: RayWorkerGroup | None = None
        self._version: int | str | None = None
        self._episode_workers: list[Any] = []
        self._starting: dict[int, ray.ObjectRef] = {}
        self._gpus: Sequence[Gpu | None] = ()
        self.in_turns = config.placement.engines == "turns"
        self._has_weights = self._serves = True
        self.num_restarts = 0

    def __len__(self) -> int:
        return self._group.world_size

    def start(self, gpus: Sequence[Gpu | None] = ()) -> CallFuture:
        """Start SGLang in all processes; the future waits until they serve.

        Args:
            gpus: in turns, the GPUs of the training workers by rank.
        """
        self._gpus = gpus
        return self._group.start_engine(gpus)

    def connect(self, policy: RayWorkerGroup) -> None:
        """Connect with the training workers that have the weights.

        Args:
            policy: the group of `ActorWorker`s.
        """
        self._policy = policy
        hosts = policy.hosts()
        is_one_node = len({host.node_id for host in [*hosts, *self._group.hosts()]}) == 1
        policy.connect_engines(
            [
                RayEngine(
                    worker,
                    self._name(rank),
                    tp_size=self._config.rollout.tensor_parallel_size,
                    timeout_s=self._config.weight_update.timeout_s,
                )
                for rank, worker in enumerate(self._group.workers)
            ],
            None if is_one_node else hosts[0].node_ip,
        )

    def serve(self, episode_workers: Sequence[Any]) -> None:
        """Run the requests of further episode workers.

        Args:
            episode_workers: handles of their actors. Those that have died are ignored.
        """
        self._restart_dead()
        self._episode_workers += episode_workers
        serving = [rank for rank in range(len(self)) if rank not in self._starting]
        ray.get([self._group.workers[rank].connect_episode_workers.remote(episode_workers) for rank in serving])

    def update_weights(self, version: int | str) -> dict[str, float]:
        """Send the weights of the policy to all engines, including those that are being restarted.

        With `rollout.partial_rollout`, running requests are interrupted and continue afterwards; else they finish
        before.

        Args:
            version: weight version that the engines report afterwards.

        Returns:
            `weight_update/*` metrics and `rollout/num_engine_restarts`.

        Raises:
            WorkerError: an engine was not updated, although it is alive.
            WorkerDiedError: as `poll`.
        """
        policy = self._policy
        assert policy is not None, "call connect() first"
        if self.in_turns:
            policy.free_unused_memory()

        def update() -> dict[str, float]:
            if self.in_turns:
                self._group.resume_weights()
            elif self._config.rollout.partial_rollout:
                self._group.interrupt()
            metrics = policy.update_weights(version)[0]
            if self._config.rollout.partial_rollout and not self.in_turns:
                self._group.proceed()
            return metrics

        metrics = self._on_all(update)
        self._version, self._has_weights = version, True
        return metrics | {"rollout/num_engine_restarts": float(self.num_restarts)}

    def release(self) -> None:
        """In turns, interrupt all requests and free the memory of the engines for the training workers."""
        if self.in_turns:
            self._on_all(self._group.release)
            self._has_weights = self._serves = False

    def resume(self) -> None:
        """In turns, give the engines their memory and the weights of the last update, and continue all requests."""
        if self._serves:
            return
        if not self._has_weights:
            assert self._version is not None, "call update_weights() first"
            self.update_weights(self._version)
        assert self._policy is not None
        self._policy.free_unused_memory()
        self._on_all(self._group.resume_serving)
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
        """Restart engines that have died, and let those serve that have been restarted.

        Raises:
            WorkerDiedError: more engines died than `rollout.max_restarts`, or one died again while it started.
        """
        self._restart_dead()
        for rank, started in list(self._starting.items()):
            if ray.wait([started], timeout=0)[0]:
                self._reopen(rank)

    def _restart_dead(self) -> bool:
        """Start engines again that have died; return whether there are any."""
        dead = self._group.dead_ranks()
        for rank in dead:
            reason = f"{self._name(rank)} died"
            if rank in self._starting or self.num_restarts >= self._config.rollout.max_restarts:
                self._group.check_alive()  # raises
            self.num_restarts += 1
            self._progress.warn(f"{reason} and is started again; its requests are repeated. See its log")
            for worker in self._episode_workers:
                worker.fail.remote(rank, reason)
            self._group.restart([rank])
            self._starting[rank] = self._group.workers[rank].start_engine.remote(self._gpus)
        return bool(dead)

    def _wait_for_restarts(self) -> None:
        self._restart_dead()
        for rank in list(self._starting):
            self._reopen(rank)

    def _reopen(self, rank: int) -> None:
        """Wait until an engine serves, give it the weights of the last update, and send it requests again."""
        try:
            ray.get(self._starting[rank], timeout=self._config.rollout.timeout_s)
        except RayTaskError as error:
            raise RuntimeError(f"{self._name(rank)} could not be started again: {error.cause}; see its log") from error
        except RayActorError:
            self._group.check_alive()  # raises
            raise
        del self._starting[rank]
        if self._policy is not None:
            self.connect(self._policy)
            if self._version is not None:
                self._policy.update_weights(self._version, [rank])
        ray.get(self._group.workers[rank].connect_episode_workers.remote(self._episode_workers))
        for worker in self._episode_workers:
            worker.reopen.remote(rank)

    def _name(self, rank: int) -> str:
        return f"rank {rank} of group {self._group.name!r}"
