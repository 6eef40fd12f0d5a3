"""Where the engines are: on GPUs of their own, or on those of the training workers in turns."""

from typing import TYPE_CHECKING, Literal

from pydantic.dataclasses import dataclass

if TYPE_CHECKING:
    from tidemill_trainer.config import Config


@dataclass(frozen=True, kw_only=True, slots=True)
class PlacementConfig:
    """Which processes share GPUs. A role with `num_workers` has GPUs of its own in all cases.

    Attributes:
        engines: "separate": engines have GPUs of their own, or with fractions of `rollout.num_gpus_per_engine` and
            `actor.num_gpus_per_worker` parts of the same ones. "turns": they use the GPUs of the policy's workers in
            turns: the engines free their weights and KV pool during training. "auto": "turns" if Ray has too few GPUs
            for "separate".
        offload: in turns, weights, gradients and optimizer state are on the CPU while the engines generate. On GPUs the
            default is false where they have room beside the KV pool for all episodes of a step.
    """

    engines: Literal["auto", "separate", "turns"] = "auto"
    offload: bool = True


def against_turns(config: "Config") -> str | None:
    """Return what turns require and the configuration does not have; None if they are possible."""
    rollout, actor = config.rollout, config.actor
    used = rollout.num_engines * rollout.tensor_parallel_size
    if config.trainer.nnodes > 1:
        return f"trainer.nnodes=1, got {config.trainer.nnodes}: engines are not placed beside the workers of each node"
    if used > actor.num_workers:
        return (
            f"rollout.num_engines x rollout.tensor_parallel_size <= actor.num_workers={actor.num_workers}, got {used}: "
            "each engine uses the GPUs of as many workers as it has ranks"
        )
    if rollout.num_gpus_per_engine is not None or actor.num_gpus_per_worker != 1:
        return "no rollout.num_gpus_per_engine and actor.num_gpus_per_worker=1: each has a whole GPU in its turn"
    if rollout.device != config.engine.device:
        return (
            f'the same rollout.device and engine.device, got "{rollout.device}" and "{config.engine.device}": they '
            "share devices"
        )
    if rollout.max_staleness > 0 and not rollout.partial_rollout:
        return (
            f"rollout.partial_rollout=true with rollout.max_staleness={rollout.max_staleness}: the engines stop when a "
            "batch is complete, so unfinished requests must be interrupted"
        )
    if not rollout.recompute_kv_cache:
        return "rollout.recompute_kv_cache=true: the memory of keys and values is freed while the GPUs train"
    return None
