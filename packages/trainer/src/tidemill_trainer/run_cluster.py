"""What the processes of every kind of run have in common: Ray, groups of training workers, and their end."""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Generic, Self, TypeVar

import ray
from tidemill_dispatch.ray import RayClassWithInitArgs, RayWorkerGroup

from tidemill_trainer.doctor.machine import check_cluster
from tidemill_trainer.out_of_memory import check_device_memory
from tidemill_trainer.progress import Progress
from tidemill_trainer.ray_session import (
    check_trainers,
    remove_on_other_nodes,
    signals_ignored,
    start_ray,
    start_training,
)
from tidemill_trainer.rollout.engine_files import EngineFiles
from tidemill_trainer.run_config import RunConfig
from tidemill_trainer.run_dir import RunDir
from tidemill_trainer.stalls.process import forget
from tidemill_trainer.stalls.watch import Watch

ConfigT = TypeVar("ConfigT", bound=RunConfig)


class RunCluster(ABC, Generic[ConfigT]):
    """Start the processes on entry and stop them on exit, the last ones first, also after an error.

    Args:
        config: configuration of the run.
        run: folder of the run, for the logs.
        progress: terminal output.
        watch: the watch over the waits of the driver.

    Attributes:
        groups: the groups of training workers, by name.
        temporary: folder for temporary files of the run, once the processes start.
        watch: the same; the caller enters it.
    """

    def __init__(self, config: ConfigT, run: RunDir, progress: Progress, watch: Watch) -> None:
        self._config = config
        self._run = run
        self._progress = progress
        self._log_dir = str(run.logs.resolve())
        self._stack = ExitStack()
        self.groups: dict[str, RayWorkerGroup] = {}
        self.temporary: Path
        self.watch = watch

    def __enter__(self) -> Self:
        try:
            with self._progress.waiting("starting Ray"):
                if start_ray(self._config.trainer.ray_address, self._num_processes()):
                    self._stack.callback(ray.shutdown)
            check_cluster(self._config, self._progress)
            self._start()
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
            self._stack.close()  # runs all callbacks, even if one raises

    def _num_processes(self) -> int:
        """Return the number of processes for which Ray is started."""
        return sum(self._config.training_workers().values())

    @abstractmethod
    def _start(self) -> None:
        """Start the processes."""

    def _create_files(self) -> EngineFiles:
        """Create the temporary folder of the processes, which is removed on all nodes after their end."""
        forget(self._run.logs)
        files = EngineFiles.create()
        self.temporary = files.folder
        self._stack.callback(files.remove)
        self._stack.callback(remove_on_other_nodes, files, self._run.logs)
        return files

    def _start_training(
        self, name: str, worker: RayClassWithInitArgs, num_workers: int, num_gpus: float, env_vars: Mapping[str, str]
    ) -> None:
        """Start the group `name` of training workers, with `num_gpus` for each."""
        group = self.groups[name] = start_training(
            name,
            worker,
            self._config.actor,
            num_workers=num_workers,
            num_nodes=math.gcd(self._config.trainer.nnodes, num_workers),  # a role may have fewer processes
            num_gpus=num_gpus,
            env_vars=env_vars,
            defaults=self._config.engine.environment,
        )
        self._stack.callback(group.shutdown)
