"""The processes of `tidemill sft`: Ray and the training workers."""

from collections.abc import Mapping

import ray
from tidemill_dispatch.ray import RayClassWithInitArgs, RayWorkerGroup

from tidemill_trainer.doctor.machine import enforce
from tidemill_trainer.doctor.room import check_room, demands
from tidemill_trainer.gpus import check_gpus, on_gpu, training_gpus
from tidemill_trainer.progress import Progress
from tidemill_trainer.ray_session import node_resources, worker_environment
from tidemill_trainer.run_cluster import RunCluster
from tidemill_trainer.run_config import RunConfig
from tidemill_trainer.run_dir import RunDir
from tidemill_trainer.sft.worker import SFTWorker
from tidemill_trainer.stalls.watch import Watch
from tidemill_trainer.waits import Wait, Waits, training_waits


class SFTCluster(RunCluster[RunConfig]):
    """Ray and the training workers.

    Args:
        config: configuration of the run.
        run: folder of the run, for the logs.
        progress: terminal output.
        waits: what the driver waits for, by phase; None: the waits of `tidemill sft`.
    """

    def __init__(
        self, config: RunConfig, run: RunDir, progress: Progress, waits: Mapping[str, Wait] | None = None
    ) -> None:
        watch = Watch(Waits(training_waits(config) if waits is None else waits), run.logs, progress)
        super().__init__(config, run, progress, watch)

    @property
    def workers(self) -> RayWorkerGroup:
        """The group of the policy's workers, one per training process."""
        return self.groups["actor"]

    def _start(self) -> None:
        config, num_gpus = self._config, ray.cluster_resources().get("GPU", 0.0)
        check_gpus(training_gpus(config, num_gpus), num_gpus)
        has_gpu = on_gpu(config.engine.device, num_gpus)
        enforce(check_room(node_resources(), demands(config, num_gpus, has_engines=False)), self._progress)
        env_vars = worker_environment(self._create_files().folder, address=config.trainer.ray_address)
        for name, (worker, num_workers, gpus) in self._workers().items():
            self._start_training(name, worker, num_workers, gpus if has_gpu else 0, env_vars)

    def _workers(self) -> dict[str, tuple[RayClassWithInitArgs, int, float]]:
        """Return the class of each group, the number of its processes and the GPUs of each, by its name."""
        actor = self._config.actor
        worker = RayClassWithInitArgs(SFTWorker, self._config, self._log_dir)
        return {"actor": (worker, actor.num_workers, actor.num_gpus_per_worker)}

    def wait_ready(self) -> None:
        """Wait until the workers have loaded the model."""
        with self.watch.waits("start"), self._progress.waiting("starting the training workers"):
            self.workers.init_model().get()
            for group in self.groups.values():
                group.wait_ready()
