"""The base of the training workers: a Ray actor with one rank of each of some models."""

import gc
import os

import ray
import torch
from tidemill_dispatch import Dispatch, Worker, register, split_over
from tidemill_engines import BaseEngine

from tidemill_trainer.checkpoints import HF_FOLDER
from tidemill_trainer.gpus import Gpu
from tidemill_trainer.rollout.engine_files import hold_temporary_folder
from tidemill_trainer.run_config import RunConfig
from tidemill_trainer.stalls.member import join_run
from tidemill_trainer.weight_hash import weight_hash

MESH = "training"
"""Name of the mesh over which a group of training workers splits a batch."""
compute = split_over(MESH)
"""Mode of the methods with a batch: each rank receives the rows of its data-parallel rank."""
POLICY = "engine"
"""Name of the policy among the models that are trained."""


class TrainingWorker(Worker):
    """One rank of models that are trained or evaluated; those that are trained are saved in checkpoints.

    Args:
        config: configuration of the run.
        log_dir: folder for the log of this process.
        group: name of the group of workers, in the name of the log.
    """

    def __init__(self, config: RunConfig, log_dir: str, group: str = "actor") -> None:
        join_run(log_dir, f"{group}_{self.rank}")
        hold_temporary_folder()
        torch.set_num_threads(config.actor.omp_num_threads)
        torch.manual_seed(config.trainer.seed)
        self._device = config.engine.device

    def _initialize(self, engine: BaseEngine) -> None:
        """Load the model of an engine, and register this rank in the mesh, which is that of all engines here."""
        engine.initialize()
        self.register_dispatch_collect_info(
            MESH, dp_rank=engine.get_data_parallel_rank(), is_collect=engine.is_mp_src_rank_with_outputs()
        )
        gc.collect()
        gc.freeze()  # otherwise full collections visit all objects that the imports created, while other ranks wait

    def _trained(self) -> dict[str, BaseEngine]:
        """Return the engines that are trained, by the name of their folder in a checkpoint."""
        return {}

    @register(Dispatch.ONE_TO_ALL)
    def hash_weights(self) -> dict[str, str]:
        """Return the hash of this rank's part of each model that is trained, by the name of its folder."""
        return {name: weight_hash(engine.get_per_tensor_shards()) for name, engine in self._trained().items()}

    @register(Dispatch.ONE_TO_ALL)
    def gpu(self) -> Gpu | None:
        """Return the GPU of this process; None on a CPU."""
        if self._device == "cpu" or not torch.cuda.is_available():
            return None
        return Gpu(
            node_id=ray.get_runtime_context().get_node_id(),
            visible=os.environ["CUDA_VISIBLE_DEVICES"],
            num_bytes=torch.cuda.mem_get_info()[1],
        )

    @register(Dispatch.ONE_TO_ALL)
    def free_unused_memory(self) -> None:
        """Return the GPU memory of freed tensors, which torch keeps for further ones, to other processes."""
        torch.cuda.empty_cache()  # does nothing on a CPU

    @register(Dispatch.ONE_TO_ALL)
    def save_checkpoint(self, folder: str) -> None:
        """Save the state of each model that is trained to a subfolder of `folder`, the policy also in `HF_FOLDER`.

        With `trainer.async_save`, the state is copied and written in the background.
        """
        for name, engine in self._trained().items():
            engine.save_checkpoint(f"{folder}/{name}", hf_path=f"{folder}/{HF_FOLDER}" if name == POLICY else None)

    @register(Dispatch.ONE_TO_ALL)
    def finish_checkpoint(self, *, waits: bool) -> bool:
        """Return whether nothing is written in the background, after waiting for it if `waits`.

        Raises:
            OSError: a write failed.
        """
        engines = self._trained().values()
        if not waits and any(engine.is_saving for engine in engines):
            return False
        for engine in engines:
            engine.finish_checkpoint()
        return True

    @register(Dispatch.ONE_TO_ALL)
    def load_checkpoint(self, folder: str) -> None:
        """Restore the states that `save_checkpoint` saved."""
        for name, engine in self._trained().items():
            engine.load_checkpoint(f"{folder}/{name}")
