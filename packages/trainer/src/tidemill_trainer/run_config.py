"""The sections that the configurations of all training runs share."""

import math
import os
from dataclasses import field
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass
from tidemill_engines import EngineConfig, FSDP2Config, MegatronConfig
from tidemill_engines.config import ModelConfig, OptimizerConfig

from tidemill_trainer.config_types import Count, CountOrNone, CountOrZero, Positive, Seed


def require(holds: bool, message: str) -> None:
    """Raise ValueError with the message unless the condition holds."""
    if not holds:
        raise ValueError(message)


@dataclass(frozen=True, kw_only=True, slots=True)
class BaseDataConfig:
    """The data files.

    Attributes:
        train_files, val_files: `.jsonl` or `.parquet` files.
        train_batch_size: rows per step.
    """

    train_files: tuple[str, ...] = ()
    val_files: tuple[str, ...] = ()
    train_batch_size: Count = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkersConfig:
    """The training processes.

    Attributes:
        num_workers: number of training processes, each with one device. The parallel sizes of `engine` must divide it;
            the quotient is the data-parallel size.
        num_gpus_per_worker: GPUs that Ray reserves per worker; a fraction shares a device with an engine.
        omp_num_threads: CPU threads of each worker, of the driver and of the episode workers.
        timeout_s: timeout of one call to the workers.
    """

    num_workers: Count = 1
    num_gpus_per_worker: Positive = 1.0
    omp_num_threads: Count = 1
    timeout_s: Positive = 1800.0


@dataclass(frozen=True, kw_only=True, slots=True)
class BaseTrainerConfig:
    """The run.

    Attributes:
        name: name of the run's folder in `run_dir`; None uses the name of the config file and the current time.
        run_dir: parent folder of all runs.
        checkpoint_dir: folder or fsspec URL, such as "s3://bucket/folder", in which the checkpoints of each run have a
            folder of its name. None: the folder `checkpoints` of the run.
        project_name: name that groups runs: the project in Weights & Biases, the experiment in MLflow.
        logger: where metrics go in addition to the terminal and `metrics.jsonl`: "tensorboard", "wandb", "mlflow". Each
            one requires the extra of its name, such as `tidemill-trainer[wandb]`.
        test_freq: validate every `test_freq` steps; 0 validates only after the last step.
        save_freq: save a checkpoint after the warm-up, every `save_freq` steps, and after the last step; 0 saves none
            between warm-up and last step, so an interrupted run loses all its steps; -1 saves nothing.
        async_save: copy what a checkpoint contains to the memory of the hosts, if it has room, and write it while the
            run continues. The checkpoint counts once it is complete; the next one and the end of the run wait for it.
        max_ckpt_to_keep: number of checkpoints to keep; older ones are removed.
        max_restarts: how often the run resumes from its newest checkpoint, or from the beginning, after a training
            worker or its node died.
        seed: seed of everything that is random.
        nnodes: number of nodes over which the training processes are spread, with the same number on each. Engines and
            episode workers run on any nodes of the Ray cluster that have room.
        ray_address: address of a running Ray cluster, or "auto" for the one that runs on this machine. None: that of
            the variable RAY_ADDRESS, which Ray sets in a job; else a cluster on this machine, which is stopped after
            the run.
    """

    name: str | None = None
    run_dir: str = "runs"
    checkpoint_dir: str | None = None
    project_name: str = "tidemill"
    logger: tuple[Literal["tensorboard", "wandb", "mlflow"], ...] = ()
    test_freq: CountOrZero = 10
    save_freq: CountOrNone = 0
    async_save: bool = True
    max_ckpt_to_keep: Count = 2
    max_restarts: CountOrZero = 0
    seed: Seed = 0
    nnodes: Count = 1
    ray_address: str | None = field(default_factory=lambda: os.environ.get("RAY_ADDRESS"))


@dataclass(frozen=True, kw_only=True, slots=True)
class RunConfig:
    """The sections that every training run has; each kind of run has a subclass.

    Attributes:
        model: the model to train.
        data: training and validation data.
        engine: the training engine; `backend` selects it, "fsdp2" or "megatron".
        optimizer: AdamW, gradient clipping and learning-rate schedule.
        actor: the training processes.
        trainer: length, validation, checkpoints and location of the run.
    """

    model: ModelConfig
    data: BaseDataConfig = field(default_factory=BaseDataConfig)
    engine: Annotated[FSDP2Config | MegatronConfig, Field(discriminator="backend")] = field(default_factory=FSDP2Config)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    actor: WorkersConfig = field(default_factory=WorkersConfig)
    trainer: BaseTrainerConfig = field(default_factory=BaseTrainerConfig)

    def __post_init__(self) -> None:
        require(math.isfinite(self.optimizer.lr), f"optimizer.lr must be a finite number, got {self.optimizer.lr}")
        for key, size in self.engine.world_size_divisors().items():
            for workers_key, workers in self.training_workers().items():
                require(workers % size == 0, f"engine.{key} = {size} must divide {workers_key}={workers}")

        name = self.trainer.name
        if name is not None:
            is_name = Path(name).name == name and name not in ("", "..")
            require(is_name, f"trainer.name must be the name of a folder in trainer.run_dir, without '/', got {name!r}")
        nodes, workers = self.trainer.nnodes, self.actor.num_workers
        require(workers % nodes == 0, f"trainer.nnodes={nodes} must divide actor.num_workers={workers}")

    def training_workers(self) -> dict[str, int]:
        """Return the number of processes of each group of training workers, by its key."""
        return {"actor.num_workers": self.actor.num_workers}

    def policy_engine(self) -> EngineConfig:
        """Return the configuration of the policy's engine, including settings that other sections imply."""
        return self.engine
