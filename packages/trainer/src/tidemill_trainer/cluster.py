"""The processes of a run: Ray, the training workers and the SGLang engines."""

import os
from contextlib import ExitStack
from functools import partial
from typing import Any

import ray
from tidemill_dispatch.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup

from tidemill_trainer.actor import ActorWorker
from tidemill_trainer.config import Config
from tidemill_trainer.config_file import ConfigError
from tidemill_trainer.doctor.facts import read_gpus
from tidemill_trainer.doctor.machine import enforce
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
from tidemill_trainer.plan.check import check_memory
from tidemill_trainer.progress import Progress
from tidemill_trainer.ray_session import node_resources, worker_environment
from tidemill_trainer.role_worker import RoleWorker
from tidemill_trainer.roles import Role, own_workers
from tidemill_trainer.rollout.engine_control import receive
from tidemill_trainer.rollout.engine_files import EngineFiles
from tidemill_trainer.rollout.engine_requests import EngineRequests
from tidemill_trainer.rollout.engines import Engines
from tidemill_trainer.rollout.episode_pool import EpisodePool
from tidemill_trainer.rollout.worker import RolloutWorker, engine_name
from tidemill_trainer.run_cluster import RunCluster
from tidemill_trainer.run_dir import RunDir
from tidemill_trainer.stalls.process import role
from tidemill_trainer.stalls.watch import Watch
from tidemill_trainer.waits import Waits, waits_of


class Cluster(RunCluster[Config]):
    """Ray, the training workers, the engines and the episode workers.

    Args:
        config: configuration of the run.
        run: folder of the run, for the logs.
        progress: terminal output.
        has_training: start training workers; without them the engines serve `model.path`.

    Attributes:
        engines: the engines, each a group of one `RolloutWorker`.
        episodes: the processes that run episodes.
    """

    engines: Engines
    episodes: EpisodePool

    def __init__(self, config: Config, run: RunDir, progress: Progress, *, has_training: bool = True) -> None:
        watch = Watch(Waits(waits_of(config)), run.logs, progress, self._queues, self._receive_requests)
        super().__init__(config, run, progress, watch)
        self._has_training = has_training
        self._requests = EngineRequests(run.engine_requests)

    @property
    def actor(self) -> RayWorkerGroup:
        """The group of `ActorWorker`s, one per training process."""
        return self.groups["actor"]

    @property
    def roles(self) -> dict[Role, RayWorkerGroup]:
        """The groups of `RoleWorker`s of the roles with processes of their own."""
        return {role: self.groups[role] for role in own_workers(self._config)}

    def _num_processes(self) -> int:
        return super()._num_processes() + self._config.rollout.num_engines + self._config.episode.num_workers

    def _start(self) -> None:
        num_gpus = ray.cluster_resources().get("GPU", 0.0)
        config = self._config = placed(self._config, num_gpus, has_training=self._has_training)
        of_training = training_gpus(config, num_gpus) if self._has_training else {}
        check_gpus(engine_gpus(config, num_gpus) | of_training, num_gpus)
        if config.trainer.ray_address is None and of_training and shares_gpus(config):
            for gpu in read_gpus(visible=os.environ.get("CUDA_VISIBLE_DEVICES")):  # the run has this machine alone
                check_memory(config, gpu.total_bytes)
        required = demands(config, num_gpus, has_training=self._has_training)
        enforce(check_room(node_resources(), required), self._progress)
        if on_gpu(config.rollout.device, num_gpus):
            self._progress.info(in_one_line(config))
        elif config.rollout.quantization is not None:
            raise ConfigError('rollout.quantization="fp8" requires GPUs, but the Ray cluster has none; remove the key')
        files = self._create_files()
        env_vars = worker_environment(files.folder, address=config.trainer.ray_address)
        if self._has_training:  # first: engines fill what the training workers leave free
            self._start_trainers(on_gpu(config.engine.device, num_gpus), env_vars)
        if config.rollout.device == "cpu":  # also on a machine with GPUs
            env_vars = env_vars | {"CUDA_VISIBLE_DEVICES": "", "TIDEMILL_SGLANG_CPU": "1"}
        self._demand = engine_demand(config, num_gpus, "engines to add", 1)
        self.engines = Engines(partial(self._start_engine, files, env_vars), config, self._progress, self._log_dir)
        self._stack.callback(self._stop_engines)
        self.engines.start_processes()
        self._stack.callback(self._requests.close)
        self._requests.open()
        num_workers = config.episode.num_workers
        self.episodes = EpisodePool(num_workers, self.engines, self._log_dir, self._progress, self.watch)
        self._stack.callback(self.episodes.shutdown)

    def _start_trainers(self, has_gpu: bool, env_vars: dict[str, str]) -> None:
        config, log_dir = self._config, self._log_dir
        actor = RayClassWithInitArgs(ActorWorker, config, log_dir)
        num_gpus = config.actor.num_gpus_per_worker if has_gpu else 0
        self._start_training("actor", actor, config.actor.num_workers, num_gpus, env_vars)
        for name, num_workers in own_workers(config).items():
            worker = RayClassWithInitArgs(RoleWorker, config, log_dir, name)
            self._start_training(name, worker, num_workers, 1.0 if has_gpu else 0, env_vars)

    def _stop_engines(self) -> None:
        with ExitStack() as stack:
            for engine in self.engines.all():  # during the run, engines are replaced, added and removed
                stack.callback(engine.group.shutdown)

    def _start_engine(self, files: EngineFiles, env_vars: dict[str, str], number: int) -> RayWorkerGroup:
        """Start the process of an engine on any node."""
        config, needed = self._config, self._demand.resources
        return RayWorkerGroup(
            RayResourcePool([1], num_cpus_per_worker=needed["CPU"], num_gpus_per_worker=needed["GPU"]),
            RayClassWithInitArgs(
                RolloutWorker,
                config.rollout,
                config.model,
                number,
                files,
                self._log_dir,
                num_episodes=num_episodes_per_engine(config),
                return_routed_experts=config.actor.router_replay.mode == "R3",
            ),
            name_prefix=engine_name(number),
            env_vars=env_vars,
            timeout_s=config.rollout.timeout_s,
            blocking=False,
        )

    def _receive_requests(self) -> None:
        receive(self._requests, self.engines, self._demand)

    def wait_ready(self) -> None:
        """Wait until the training workers have loaded the model and the engines serve, and connect them."""
        what = "starting SGLang" + (" and the training workers" if self._has_training else "")
        with self.watch.waits("start"), self._progress.waiting(what):
            serving = None if self.engines.in_turns else self.engines.start()
            gpus = self._load_model() if self._has_training else []
            if serving is None:  # engines fill what the training workers leave free
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
        """Load the model in the training workers, if it fits there beside the engines; return their GPUs.

        Engines that take turns with them are prepared meanwhile.
        """
        gpus: list[Gpu | None] = self.actor.gpu()
        if gpus[0] is not None and shares_gpus(self._config):
            check_memory(self._config, gpus[0].num_bytes, self._progress)  # also without nvidia-smi, or elsewhere
        if self.engines.in_turns:
            for engine in self.engines.all():
                engine.group.prepare_engine(gpus)
        self.actor.init_model().get()  # an invalid model fails here earlier than in the engine
        for group in self.roles.values():
            group.wait_ready()
        return gpus

    def _queues(self) -> dict[str, Any]:
        """Return references to the descriptions of the queues of engines and episode workers, by owner."""
        engines = {role(engine.name): engine.worker for engine in self.engines.all()}
        episodes = {role(f"episodes_{number}"): worker for number, worker in enumerate(self.episodes.workers)}
        return {owner: worker.queue.remote() for owner, worker in (engines | episodes).items()}
