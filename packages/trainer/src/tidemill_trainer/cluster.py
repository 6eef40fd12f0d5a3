"""The processes of a run: Ray, the training workers and the SGLang engines."""

import math
from contextlib import ExitStack
from functools import partial
from types import TracebackType
from typing import Any, Self

import ray
from tidemill_dispatch.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup

from tidemill_trainer.actor import ActorWorker
from tidemill_trainer.config import Config
from tidemill_trainer.doctor.machine import check_cluster, enforce
from tidemill_trainer.doctor.room import check_room, demands, engine_demand
from tidemill_trainer.gpu_defaults import in_one_line
from tidemill_trainer.gpus import (
    Gpu,
    check_gpus,
    engine_gpus,
    num_episodes_per_engine,
    on_gpu,
    placed,
    shares_gpus,
    training_gpus,
)
from tidemill_trainer.out_of_memory import check_device_memory
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
from tidemill_trainer.rollout.engine_control import receive
from tidemill_trainer.rollout.engine_files import EngineFiles
from tidemill_trainer.rollout.engine_requests import EngineRequests
from tidemill_trainer.rollout.engines import Engines
from tidemill_trainer.rollout.episode_pool import EpisodePool
from tidemill_trainer.rollout.worker import RolloutWorker, engine_name
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
        engines: the engines, each a group of one `RolloutWorker`.
        episodes: the processes that run episodes.
        watch: the watch over the waits of the driver; the caller enters it.
    """

    actor: RayWorkerGroup
    roles: dict[Role, RayWorkerGroup]
    engines: Engines
    episodes: EpisodePool

    def __init__(self, config: Config, run: RunDir, progress: Progress, *, has_training: bool = True) -> None:
        self._config = config
        self._has_training = has_training
        self._run = run
        self._progress = progress
        self._requests = EngineRequests(run.engine_requests)
        self.watch = Watch(Waits(waits_of(config)), run.logs, progress, self._queues, self._receive_requests)
        self._groups: list[RayWorkerGroup] = []
        self._started: Engines | None = None
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
            check_device_memory(error, self._config, self._run.logs)
            check_trainers(error, self._groups)
        finally:
            self.close()

    def close(self) -> None:
        """Stop all processes of the run. A second call does nothing."""
        groups, self._groups = self._groups, []
        if self._started is not None:
            groups += [engine.group for engine in self._started.all()]
        self._started = None
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
            stack.callback(self._requests.close)
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
        self._demand = engine_demand(config, num_gpus, "engines to add", 1)
        self.engines = self._started = Engines(partial(self._start_engine, env_vars), config, self._progress)
        self.engines.start_processes()
        self._requests.open()
        self.episodes = self._pool = EpisodePool(
            config.episode.num_workers, self.engines, logs, self._progress, self.watch
        )

    def _start_engine(self, env_vars: dict[str, str], number: int) -> RayWorkerGroup:
        """Start the process of an engine on any node."""
        config, needed = self._config, self._demand.resources
        assert self._files is not None
        return RayWorkerGroup(
            RayResourcePool([1], num_cpus_per_worker=needed["CPU"], num_gpus_per_worker=needed["GPU"]),
            RayClassWithInitArgs(
                RolloutWorker,
                config.rollout,
                config.model,
                number,
                self._files,
                str(self._run.logs.resolve()),
                num_episodes=num_episodes_per_engine(config),
                return_routed_experts=config.actor.router_replay.mode == "R3",
            ),
            name_prefix=engine_name(number),
            env_vars=env_vars,
            timeout_s=config.rollout.timeout_s,
            blocking=False,
        )

    def _receive_requests(self) -> None:
        if self._started is not None:
            receive(self._requests, self._started, self._demand)

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
            for engine in serving:
                engine.get()
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
        engines = {role(engine.name): engine.worker for engine in self.engines.all()}
        episodes = {role(f"episodes_{number}"): worker for number, worker in enumerate(self.episodes.workers)}
        return {owner: worker.queue.remote() for owner, worker in (engines | episodes).items()}
