"""The GPUs that the processes of a run reserve."""

from typing import Literal

from tidemill_trainer.config import Config
from tidemill_trainer.config_file import ConfigError


def on_gpu(device: Literal["auto", "cpu", "cuda"], num_gpus: float) -> bool:
    """Return whether processes with this setting run on GPUs, in a cluster with `num_gpus` of them."""
    return device == "cuda" or (device == "auto" and num_gpus > 0)


def gpus_per_engine(config: Config) -> float:
    """Return the number of GPUs of an engine for generation that runs on GPUs."""
    rollout = config.rollout
    return float(rollout.tensor_parallel_size) if rollout.num_gpus_per_engine is None else rollout.num_gpus_per_engine


def check_gpus(config: Config, num_gpus: float, *, has_training: bool) -> None:
    """Check that the cluster has the GPUs that the processes of a run reserve.

    Args:
        config: configuration of the run.
        num_gpus: GPUs of the cluster.
        has_training: whether there are training workers.

    Raises:
        ConfigError: the cluster has fewer; the message names the keys.
    """
    required: dict[str, float] = {}
    if on_gpu(config.rollout.device, num_gpus):
        required["rollout.num_engines"] = config.rollout.num_engines * gpus_per_engine(config)
    if has_training and on_gpu(config.engine.device, num_gpus):
        required |= config.training_workers()
        required["actor.num_workers"] *= config.actor.num_gpus_per_worker
    total = sum(required.values())
    if total <= num_gpus + 1e-6:  # fractions
        return
    parts = ", ".join(f"{number:g} for {key}" for key, number in required.items())
    raise ConfigError(
        f"the run requires {total:g} GPUs, {parts}, but the Ray cluster has {num_gpus:g}; lower these numbers, let "
        "engines and workers share GPUs with fractions of rollout.num_gpus_per_engine and actor.num_gpus_per_worker, "
        "or remove the num_workers of a role, which then shares the processes of the policy"
    )
