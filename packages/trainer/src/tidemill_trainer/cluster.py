"""The processes of a run: Ray, the training workers and the SGLang engines."""

import math
from contextlib import ExitStack
from types import TracebackType
from typing import Any, Self

import ray
from tidemill_dispatch.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup

from tidemill_trainer.actor import ActorWorker
from tidemill_trainer.config import Config
from tidemill_trainer.doctor.machine import check_cluster, enforce
from tidemill_trainer.doctor.room import check_room, demands
from tidemill_trainer.gpu_defaults import in_one_line
from tidemill_trainer.gpus import (
    Gpu,
    check_gpus,
    engine_gpus,
    gpus_per_engine,
    on_gpu,
    placed,
    shares_gpus,
    training_gpus,
)
from tidemill_trainer.plan.check import check_memory
from tidemill_trainer.progress import Progress
from tidemill_trainer.ray_session import (
    check_trainers,
    node_resources,
    remove_on_other_nodes,
    signals_ignored,
    start_ray,
    start_training,
    worker_environment,
)
from tidemill_trainer.role_worker import RoleWorker
from tidemill_trainer.roles import Role, own_workers
from tidemill_trainer.rollout.engine_files import EngineFiles
from tidemill_trainer.rollout.engines import Engines
from tidemill_trainer.rollout.episode_pool import EpisodePool
from tidemill_trainer.rollout.worker import RolloutWorker, num_episodes_per_engine
from tidemill_trainer.run_dir import RunDir
from tidemill_trainer.stalls.process import forget, role
from tidemill_trainer.stalls.watch import Watch
from tidemill_trainer.waits import Waits, waits_of


class Cluster:
    """Start the processes on entry and stop them on exit, also after an error.

    Args:
        config: configuration of the run.
        run: folder of the run, for the logs.
        progress: terminal output.
        has_training: start training workers; without them the engines serve `model.path`.

    Attributes:
        actor: the group of `ActorWorker`s, one per training process.
        roles: the groups of `RoleWorker`s of the roles with processes of their own.
        rollout: the group of `RolloutWorker`s, one per engine.
        engines: the engines in these processes.
        episodes: the processes that run episodes.
        watch: the watch over the waits of the driver; the caller enters it.
    """

    actor: RayWorkerGroup
    roles: dict[Role, RayWorkerGroup]
    rollout: RayWorkerGroup
    engines: Engines
    episodes: EpisodePool

    def __init__(self, config: Config, run: RunDir, progress: Progress, *, has_training: bool = True) -> None:
        self._config = config
        self._has_training = has_training
        self._run = run
        self._progress = progress
        self.watch = Watch(Waits(waits_of(config)), run.logs, progress, self._queues)
        self._groups: list[RayWorkerGroup] = []
        self._files: EngineFiles | None = None
        self._pool: EpisodePool | None = None
        self._owns_ray = False

    def __enter__(self) -> Self:
        try:
            with self._progress.waiting("starting Ray"):
                config = self._config
                num_processes = config.rollout.num_engines + config.episode.num_workers
                num_processes += sum(config.training_workers().values())
                self._owns_ray = start_ray(config.trainer.ray_address, num_processes)
            check_cluster(config, self._progress)
            self._start_groups()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            check_trainers(error, [group for group in self._groups if group is not self.rollout])
        finally:
            self.close()

    def close(self) -> None:
        """Stop all processes of the run. A second call does nothing."""
        groups, self._groups = self._groups, []
        files, self._files = self._files, None
        pool, self._pool = self._pool, None
        owns_ray, self._owns_ray = self._owns_ray, False
        with signals_ignored(), ExitStack() as stack:  # runs all callbacks, last one first, even if one raises
            if owns_ray:
                stack.callback(ray.shutdown)
            if files is not None:
                stack.callback(files.remove)
                if ray.is_initialized():
                    stack.callback(remove_on_other_nodes, files, self._run.logs)
            for group in groups:
                stack.callback(group.shutdown)
            if pool is not None:
                stack.callback(pool.shutdown)

    def _start_groups(self) -> None:
        logs, num_gpus = str(self._run.logs.resolve()), ray.cluster_resources().get("GPU", 0.0)
        config = self._config = placed(self._config, num_gpus, has_training=self._has_training)
        of_training = training_gpus(config, num_gpus) if self._has_training else {}
        check_gpus(engine_gpus(config, num_gpus) | of_training, num_gpus)
        required = demands(config, num_gpus, has_training=self._has_training)
        enforce(check_room(node_resources(), required), self._progress)
        if on_gpu(config.rollout.device, num_gpus):
            self._progress.info(in_one_line(config))
        forget(self._run.logs)
        self._files = EngineFiles.create()
        no_leftovers = worker_environment(self._files.folder, address=config.trainer.ray_address)
        env_vars = dict(no_leftovers)
        if config.rollout.device == "cpu":  # also on a machine with GPUs
            env_vars |= {"CUDA_VISIBLE_DEVICES": "", "TIDEMILL_SGLANG_CPU": "1"}
        if self._has_training:  # first: engines fill what the training workers leave free
            self._start_training(on_gpu(config.engine.device, num_gpus), no_leftovers)
        self.rollout = RayWorkerGroup(
            RayResourcePool(
                process_on_nodes=[1] * config.rollout.num_engines,  # on any nodes
                num_gpus_per_worker=gpus_per_engine(config) if on_gpu(config.rollout.device, num_gpus) else 0,
            ),
            RayClassWithInitArgs(
                RolloutWorker,
                config.rollout,
                config.model,
                self._files,
                logs,
                num_episodes=num_episodes_per_engine(config),
                return_routed_experts=config.actor.router_replay.mode == "R3",
            ),
            name_prefix="rollout",
            env_vars=env_vars,
            timeout_s=config.rollout.timeout_s,
            blocking=False,
        )
        self._groups.append(self.rollout)
        self.engines = Engines(self.rollout, config, self._progress)
        self.episodes = self._pool = EpisodePool(
            config.episode.num_workers, self.engines, logs, self._progress, self.watch
        )

    def _start_training(self, has_gpu: bool, env_vars: dict[str, str]) -> None:
        config, logs = self._config, str(self._run.logs.resolve())

        def start(name: str, worker: RayClassWithInitArgs, num_workers: int, num_gpus: float) -> RayWorkerGroup:
            group = start_training(
                name,
                worker,
                config.actor,
                num_workers=num_workers,
                num_nodes=math.gcd(config.trainer.nnodes, num_workers),  # a role may have fewer processes
                num_gpus=num_gpus if has_gpu else 0,
                env_vars=env_vars,
            )
            self._groups.append(group)
            return group

        actor = RayClassWithInitArgs(ActorWorker, config, logs)
        self.actor = start("actor", actor, config.actor.num_workers, config.actor.num_gpus_per_worker)
        self.roles = {
            role: start(role, RayClassWithInitArgs(RoleWorker, config, logs, role), num_workers, 1.0)
            for role, num_workers in own_workers(config).items()
        }

    def wait_ready(self) -> None:
        """Wait until the training workers have loaded the model and the engines serve, and connect them."""
        what = "starting SGLang" + (" and the training workers" if self._has_training else "")
        with self.watch.waits("start"), self._progress.waiting(what):
            serving = None if self.engines.in_turns else self.engines.start()
            gpus = self._load_model() if self._has_training else []
            if serving is None:
                self.actor.free_unused_memory()
                serving = self.engines.start(gpus)
            serving.get()
        if not self._has_training:
            return
        with self.watch.waits("connect"):
            self.engines.connect(self.actor)
            self.engines.release()

    def _load_model(self) -> list[Gpu | None]:
        """Load the model in the training workers, if it fits there beside the engines; return their GPUs."""
        gpus: list[Gpu | None] = self.actor.gpu()
        if gpus[0] is not None and shares_gpus(self._config):
            check_memory(self._config, gpus[0].num_bytes, self._progress)
        self.actor.init_model().get()  # an invalid model fails here earlier than in the engine
        for group in self.roles.values():
            group.wait_ready()
        return gpus

    def _queues(self) -> dict[str, Any]:
        """Return references to the descriptions of the queues of engines and episode workers, by owner."""
        engines = {role(f"rollout_{rank}"): worker for rank, worker in enumerate(self.rollout.workers)}
        episodes = {role(f"episodes_{number}"): worker for number, worker in enumerate(self.episodes.workers)}
        return {owner: worker.queue.remote() for owner, worker in (engines | episodes).items()}
