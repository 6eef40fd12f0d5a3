"""The GPUs that the processes of a run reserve."""

from collections.abc import Mapping
from typing import Literal

from tidemill_trainer.config import Config
from tidemill_trainer.config_file import ConfigError
from tidemill_trainer.run_config import RunConfig


def on_gpu(device: Literal["auto", "cpu", "cuda"], num_gpus: float) -> bool:
    """Return whether processes with this setting run on GPUs, in a cluster with `num_gpus` of them."""
    return device == "cuda" or (device == "auto" and num_gpus > 0)


def gpus_per_engine(config: Config) -> float:
    """Return the number of GPUs of an engine for generation that runs on GPUs."""
    rollout = config.rollout
    return float(rollout.tensor_parallel_size) if rollout.num_gpus_per_engine is None else rollout.num_gpus_per_engine


def engine_gpus(config: Config, num_gpus: float) -> dict[str, float]:
    """Return the GPUs that the engines reserve in a cluster with `num_gpus`, by key."""
    if not on_gpu(config.rollout.device, num_gpus):
        return {}
    return {"rollout.num_engines": config.rollout.num_engines * gpus_per_engine(config)}


def training_gpus(config: RunConfig, num_gpus: float) -> dict[str, float]:
    """Return the GPUs that the training workers reserve in a cluster with `num_gpus`, by key."""
    if not on_gpu(config.engine.device, num_gpus):
        return {}
    workers = config.training_workers()
    return workers | {"actor.num_workers": workers["actor.num_workers"] * config.actor.num_gpus_per_worker}


def check_gpus(required: Mapping[str, float], num_gpus: float) -> None:
    """Check that the cluster has the GPUs that the processes of a run reserve.

    Args:
        required: GPUs by key.
        num_gpus: GPUs of the cluster.

    Raises:
        ConfigError: the cluster has fewer; the message names the keys.
    """
    total = sum(required.values())
    if total <= num_gpus + 1e-6:  # fractions
        return
    parts = ", ".join(f"{number:g} for {key}" for key, number in required.items())
    message = f"the run requires {total:g} GPUs, {parts}, but the Ray cluster has {num_gpus:g}; lower these numbers"
    if len(required) > 1:
        message += (
            ", let engines and workers share GPUs with fractions of rollout.num_gpus_per_engine and "
            "actor.num_gpus_per_worker, or remove the num_workers of a role, which then shares the processes of the "
            "policy"
        )
    raise ConfigError(message)
