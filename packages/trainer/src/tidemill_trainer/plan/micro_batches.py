"""The largest micro-batches that fit into the memory of the GPUs, and what stays there in turns."""

import math
from collections.abc import Collection
from dataclasses import replace

from tidemill_engines import FSDP2Config

from tidemill_trainer.config import Config
from tidemill_trainer.gpus import num_episodes_per_engine, placed
from tidemill_trainer.plan.model import ModelSizes
from tidemill_trainer.plan.phases import PHASES, SHARE, engine_parts, plan_devices, role_sizes

_TOKENS = (65536, 32768, 16384, 8192, 4096)
_ENOUGH = 16384
"""Tokens from which FSDP2 may keep gathered weights instead of using their memory for larger micro-batches."""


def with_micro_batches(config: Config, given: Collection[str], num_gpus: float, device_bytes: float) -> Config:
    """Return the configuration with micro-batches that the GPUs have memory for, in every phase of training.

    With FSDP2, gathered weights are kept (`reshard_after_forward=false`) if they fit beside micro-batches of 16,384
    tokens: then they are cast and gathered once a step and not twice in every micro-batch. In turns, the state of the
    training workers stays on the GPUs if it fits beside the KV pool of an engine and costs no such micro-batch.

    Args:
        config: configuration of the run.
        given: keys of the user, such as "engine.max_token_len_per_gpu"; these stay.
        num_gpus: GPUs of the cluster.
        device_bytes: free memory of each.

    Returns:
        The configuration; unchanged if nothing fits, or if the model cannot be read.
    """
    try:
        sizes = role_sizes(config)
    except (OSError, ValueError):  # a later check names the problem of the model
        return config
    for option in _micro_batches(config, given):
        resident = None if "placement.offload" in given else _resident(option, sizes, given, num_gpus, device_bytes)
        for candidate in (resident, option):
            if candidate is not None and _fits(candidate, sizes, num_gpus, device_bytes):
                return candidate
    return config


def _micro_batches(config: Config, given: Collection[str]) -> list[Config]:
    """Return the configuration with the micro-batches to try, the best ones first."""
    longest = config.data.max_prompt_length + config.rollout.response_length
    has_room_for = longest if config.reward_model.path is None else longest + 1
    engine = config.engine
    tokens = [engine.max_token_len_per_gpu]
    if "engine.max_token_len_per_gpu" not in given:
        sized = [replace(engine, max_token_len_per_gpu=each) for each in _TOKENS]
        tokens = [each.max_token_len_per_gpu for each in sized if each.max_tokens >= has_room_for] or tokens
    options = [replace(engine, max_token_len_per_gpu=each) for each in tokens]
    if isinstance(engine, FSDP2Config) and "engine.reshard_after_forward" not in given:
        kept = [replace(each, reshard_after_forward=False) for each in options]
        options = [each for each in kept if each.max_token_len_per_gpu >= min(_ENOUGH, tokens[0])] + options
    return [replace(config, engine=option) for option in options]


def _resident(
    config: Config, sizes: dict[str, ModelSizes], given: Collection[str], num_gpus: float, device_bytes: float
) -> Config | None:
    """Return the configuration in turns without offloading, if the engine keeps room for all episodes of a step.

    What stays on a GPU is taken from the KV pool of the engine, whose share is lowered.
    """
    rollout = config.rollout
    config = replace(config, placement=replace(config.placement, offload=False))
    there = placed(config, num_gpus)
    is_set = "rollout.mem_fraction_static" in given or "mem_fraction_static" in rollout.engine_args
    if there.placement.engines != "turns" or is_set:
        return None
    shared = plan_devices(there, sizes, device_bytes)[0].phases["generation"]
    state = sum(part.num_bytes for part in shared if part.role != "engine")
    longest = config.data.max_prompt_length + rollout.response_length
    rows = replace(rollout, max_total_tokens=num_episodes_per_engine(config) * longest)
    needed = sum(part.num_bytes for part in engine_parts(replace(config, rollout=rows), sizes["policy"], device_bytes))
    fraction = math.floor(100 * (rollout.mem_fraction_static - state / device_bytes)) / 100
    if fraction * device_bytes < needed:
        return None
    return replace(config, rollout=replace(rollout, mem_fraction_static=fraction))


def _fits(config: Config, sizes: dict[str, ModelSizes], num_gpus: float, device_bytes: float) -> bool:
    """Return whether the devices of the training workers have room in all phases after generation."""
    devices = plan_devices(placed(config, num_gpus), sizes, device_bytes)
    trains = [device for device in devices if device.name != "engine"]
    return all(device.total(phase) <= SHARE * device_bytes for device in trains for phase in PHASES[1:])
