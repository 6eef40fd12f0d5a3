"""The processes of `tidemill sft`: Ray and the training workers."""

import math
from collections.abc import Mapping
from contextlib import ExitStack
from types import TracebackType
from typing import Self

import ray
from tidemill_dispatch.ray import RayClassWithInitArgs, RayWorkerGroup

from tidemill_trainer.doctor.machine import check_cluster, enforce
from tidemill_trainer.doctor.room import check_room, demands
from tidemill_trainer.gpus import check_gpus, on_gpu, training_gpus
from tidemill_trainer.out_of_memory import check_device_memory
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
from tidemill_trainer.rollout.engine_files import EngineFiles
from tidemill_trainer.run_config import RunConfig
from tidemill_trainer.run_dir import RunDir
from tidemill_trainer.sft.worker import SFTWorker
from tidemill_trainer.stalls.process import forget
from tidemill_trainer.stalls.watch import Watch
from tidemill_trainer.waits import Wait, Waits, training_waits


class SFTCluster:
    """Start the processes on entry and stop them on exit, also after an error.

    Args:
        config: configuration of the run.
        run: folder of the run, for the logs.
        progress: terminal output.
        waits: what the driver waits for, by phase; None: the waits of `tidemill sft`.

    Attributes:
        workers: the group of the policy's workers, one per training process.
        groups: all groups of workers, by name.
        watch: the watch over the waits of the driver; the caller enters it.
    """

    workers: RayWorkerGroup

    def __init__(
        self, config: RunConfig, run: RunDir, progress: Progress, waits: Mapping[str, Wait] | None = None
    ) -> None:
        self._config = config
        self._run = run
        self._progress = progress
        self.groups: dict[str, RayWorkerGroup] = {}
        self.watch = Watch(Waits(training_waits(config) if waits is None else waits), run.logs, progress)
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        try:
            with self._progress.waiting("starting Ray"):
                if start_ray(self._config.trainer.ray_address, sum(self._config.training_workers().values())):
                    self._stack.callback(ray.shutdown)
            check_cluster(self._config, self._progress)
            self._start_workers()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            check_device_memory(error, self._config, self._run.logs)
            check_trainers(error, [*self.groups.values()])
        finally:
            self.close()

    def close(self) -> None:
        """Stop all processes of the run. A second call does nothing."""
        with signals_ignored():
            self._stack.close()

    def _start_workers(self) -> None:
        config, logs = self._config, self._run.logs
        num_gpus = ray.cluster_resources().get("GPU", 0.0)
        check_gpus(training_gpus(config, num_gpus), num_gpus)
        has_gpu = on_gpu(config.engine.device, num_gpus)
        workers = self._workers(str(logs.resolve()))
        enforce(check_room(node_resources(), demands(config, num_gpus, has_engines=False)), self._progress)
        forget(logs)
        files = EngineFiles.create()
        self._stack.callback(files.remove)
        self._stack.callback(remove_on_other_nodes, files, logs)
        env_vars = worker_environment(files.folder, address=config.trainer.ray_address)
        for name, (worker, num_workers, gpus) in workers.items():
            group = self.groups[name] = start_training(
                name,
                worker,
                config.actor,
                num_workers=num_workers,
                num_nodes=math.gcd(config.trainer.nnodes, num_workers),
                num_gpus=gpus if has_gpu else 0,
                env_vars=env_vars,
            )
            self._stack.callback(group.shutdown)
        self.workers = self.groups["actor"]

    def _workers(self, log_dir: str) -> dict[str, tuple[RayClassWithInitArgs, int, float]]:
        """Return the class of each group, the number of its processes and the GPUs of each, by its name."""
        actor = self._config.actor
        worker = RayClassWithInitArgs(SFTWorker, self._config, log_dir)
        return {"actor": (worker, actor.num_workers, actor.num_gpus_per_worker)}

    def wait_ready(self) -> None:
        """Wait until the workers have loaded the model."""
        with self.watch.waits("start"), self._progress.waiting("starting the training workers"):
            self.workers.init_model().get()
            for group in self.groups.values():
                group.wait_ready()
