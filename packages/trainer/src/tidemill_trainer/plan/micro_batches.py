"""The largest micro-batches that fit into the memory of the GPUs."""

from collections.abc import Collection
from dataclasses import replace

from tidemill_engines import FSDP2Config

from tidemill_trainer.config import Config
from tidemill_trainer.gpus import placed
from tidemill_trainer.plan.model import ModelSizes
from tidemill_trainer.plan.phases import PHASES, plan_devices, role_sizes

_SHARE = 0.8
"""Used share of a device. Estimates are within 15 % of measured peaks; the rest is for CUDA and a sleeping engine."""
_TOKENS = (32768, 16384, 8192, 4096)
_ENOUGH = 16384
"""Tokens from which FSDP2 may keep gathered weights instead of using their memory for larger micro-batches."""


def with_micro_batches(config: Config, keys: Collection[str], num_gpus: float, device_bytes: float) -> Config:
    """Return the configuration with micro-batches that the GPUs have memory for, in every phase of training.

    With FSDP2, gathered weights are kept (`reshard_after_forward=false`) if they fit beside micro-batches of 16,384
    tokens: then they are cast and gathered once a step and not twice in every micro-batch.

    Args:
        config: configuration of the run.
        keys: keys of `[engine]` that are open: "max_token_len_per_gpu", "reshard_after_forward". Others stay.
        num_gpus: GPUs of the cluster.
        device_bytes: free memory of each.

    Returns:
        The configuration; unchanged if nothing fits, or if the model cannot be read.
    """
    try:
        sizes = role_sizes(config)
    except (OSError, ValueError):  # a later check names the problem of the model
        return config
    longest = config.data.max_prompt_length + config.rollout.response_length
    has_room_for = longest if config.reward_model.path is None else longest + 1
    engine = config.engine
    tokens = [each for each in _TOKENS if each >= has_room_for] if "max_token_len_per_gpu" in keys else []
    tokens = tokens or [engine.max_token_len_per_gpu]
    options = [replace(engine, max_token_len_per_gpu=each) for each in tokens]
    if isinstance(engine, FSDP2Config) and "reshard_after_forward" in keys:
        kept = [replace(each, reshard_after_forward=False) for each in options]
        options = [each for each in kept if each.max_token_len_per_gpu >= min(_ENOUGH, tokens[0])] + options
    for option in options:
        candidate = replace(config, engine=option)
        if _fits(candidate, sizes, num_gpus, device_bytes):
            return candidate
    return config


def _fits(config: Config, sizes: dict[str, ModelSizes], num_gpus: float, device_bytes: float) -> bool:
    """Return whether the devices of the training workers have room in all phases after generation."""
    devices = plan_devices(placed(config, num_gpus), sizes, device_bytes)
    trains = [device for device in devices if device.name != "engine"]
    return all(device.total(phase) <= _SHARE * device_bytes for device in trains for phase in PHASES[1:])
