"""The processes of `tidemill replay`: Ray and the training workers of a run, without engines."""

from tidemill_dispatch.ray import RayClassWithInitArgs, RayWorkerGroup

from tidemill_trainer.actor import ActorWorker
from tidemill_trainer.config import Config
from tidemill_trainer.progress import Progress
from tidemill_trainer.role_worker import RoleWorker
from tidemill_trainer.roles import Role, own_workers
from tidemill_trainer.run_dir import RunDir
from tidemill_trainer.sft.cluster import SFTCluster
from tidemill_trainer.waits import waits_of


class ReplayCluster(SFTCluster):
    """Start the processes on entry and stop them on exit, as `SFTCluster` does.

    Args:
        config: configuration of the run.
        run: folder for the logs.
        progress: terminal output.
    """

    _config: Config

    def __init__(self, config: Config, run: RunDir, progress: Progress) -> None:
        super().__init__(config, run, progress, waits_of(config))

    @property
    def roles(self) -> dict[Role, RayWorkerGroup]:
        """The groups of the roles with processes of their own."""
        return {role: self.groups[role] for role in own_workers(self._config)}

    def _workers(self) -> dict[str, tuple[RayClassWithInitArgs, int, float]]:
        config, actor = self._config, self._config.actor
        policy = RayClassWithInitArgs(ActorWorker, config, self._log_dir)
        return {"actor": (policy, actor.num_workers, actor.num_gpus_per_worker)} | {
            role: (RayClassWithInitArgs(RoleWorker, config, self._log_dir, role), num_workers, 1.0)
            for role, num_workers in own_workers(config).items()
        }
