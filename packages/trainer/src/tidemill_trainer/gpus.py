"""The GPUs that the processes of a run reserve."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from tidemill_trainer.config import Config
from tidemill_trainer.config_file import ConfigError
from tidemill_trainer.placement import against_turns
from tidemill_trainer.run_config import RunConfig

_CPUS_OF_OWN_CLUSTER = 1 / 64
_ROUNDING = 1e-6  # of sums of fractions


@dataclass(frozen=True, kw_only=True, slots=True)
class Gpu:
    """The GPU of a training worker.

    Attributes:
        node_id: Ray's id of its node.
        visible: `CUDA_VISIBLE_DEVICES` of the worker.
        num_bytes: memory of the GPU.
    """

    node_id: str
    visible: str
    num_bytes: int


def on_gpu(device: Literal["auto", "cpu", "cuda"], num_gpus: float) -> bool:
    """Return whether processes with this setting run on GPUs, in a cluster with `num_gpus` of them."""
    return device == "cuda" or (device == "auto" and num_gpus > 0)


def gpus_per_engine(config: Config) -> float:
    """Return the number of GPUs that an engine reserves if it runs on GPUs; in turns, the training workers do."""
    rollout = config.rollout
    if config.placement.engines == "turns":
        return 0.0
    return float(rollout.tensor_parallel_size) if rollout.num_gpus_per_engine is None else rollout.num_gpus_per_engine


def cpus_per_engine(config: Config) -> float:
    """Return the number of CPUs that an engine reserves.

    A cluster of the run's own has one CPU per process, because Ray starts as many in advance. With a part of it, each
    engine leaves room for those that are added later.
    """
    return _CPUS_OF_OWN_CLUSTER if config.trainer.ray_address is None else 1.0


def num_episodes_per_engine(config: Config) -> int:
    """Return the number of episodes that an engine generates at the same time while a step starts."""
    rollout = config.rollout
    return -(-config.data.train_batch_size * rollout.n * (1 + rollout.max_staleness) // rollout.num_engines)


def shares_gpus(config: Config) -> bool:
    """Return whether an engine and a training worker use the same GPU, in turns or at the same time."""
    return gpus_per_engine(config) + config.actor.num_gpus_per_worker <= 1


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


def placed(config: Config, num_gpus: float, *, has_training: bool = True) -> Config:
    """Return the configuration of a run in a cluster with `num_gpus`, with `placement.engines` decided.

    In turns, the policy and the roles in its processes offload everything that is not at work, unless
    `placement.offload` is false. Without training, the engines have their own GPUs.
    """
    engines = config.placement.engines if has_training else "separate"
    if engines == "auto":
        training = sum(training_gpus(config, num_gpus).values())
        fits = training + sum(engine_gpus(config, num_gpus).values()) <= num_gpus + _ROUNDING
        can_share = 0 < training <= num_gpus + _ROUNDING and against_turns(config) is None
        engines = "separate" if fits or not can_share else "turns"
    placement = replace(config.placement, engines=engines)
    config = replace(config, placement=placement)
    return _offloaded(config) if engines == "turns" and placement.offload else config


def _offloaded(config: Config) -> Config:
    engine = config.engine
    if not getattr(engine, "offload_policy", False):  # with it, everything is on the CPU at all times
        engine = replace(engine, param_offload=True, grad_offload=True, optimizer_offload=True)
    roles = {
        name: replace(section, param_offload=True)
        for name in ("reference", "critic", "teacher", "reward_model")
        if (section := getattr(config, name)).num_workers is None
    }
    return replace(config, engine=engine, **roles)


def check_gpus(required: Mapping[str, float], num_gpus: float) -> None:
    """Check that the cluster has the GPUs that the processes of a run reserve.

    Args:
        required: GPUs by key.
        num_gpus: GPUs of the cluster.

    Raises:
        ConfigError: the cluster has fewer; the message names the keys.
    """
    total = sum(required.values())
    if total <= num_gpus + _ROUNDING:
        return
    parts = ", ".join(f"{number:g} for {key}" for key, number in required.items())
    message = f"the run requires {total:g} GPUs, {parts}, but the Ray cluster has {num_gpus:g}; lower these numbers"
    if len(required) > 1:
        message += (
            ", let engines and workers share GPUs in turns (placement.engines), or at the same time with fractions of "
            "rollout.num_gpus_per_engine and actor.num_gpus_per_worker, or remove the num_workers of a role, which "
            "then shares the processes of the policy"
        )
    raise ConfigError(message)
