"""Generation by SGLang engines in Ray actors."""

from tidemill_trainer.rollout.client import RayEngine
from tidemill_trainer.rollout.engine_files import EngineFiles
from tidemill_trainer.rollout.worker import RolloutWorker

__all__ = ["EngineFiles", "RayEngine", "RolloutWorker"]
