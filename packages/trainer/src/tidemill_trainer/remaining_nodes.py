"""The configuration of a run on what is left of its cluster."""

from collections.abc import Iterator, Mapping
from dataclasses import replace

from tidemill_trainer.config import Config
from tidemill_trainer.config_file import ConfigError, ConfigT
from tidemill_trainer.doctor.finding import Finding
from tidemill_trainer.doctor.room import Resources, check_room, demands
from tidemill_trainer.gpus import placed
from tidemill_trainer.run_config import RunConfig


def fitted(config: ConfigT, nodes: Mapping[str, Resources]) -> ConfigT:
    """Return the configuration with as many processes as the nodes have room for.

    `actor.num_workers` is kept if possible, else it becomes the largest divisor with room, so that it still divides
    whatever it divided; then come engines and episode workers. Roles keep their numbers of processes.

    Args:
        config: configuration of the run.
        nodes: resources of each node, by its name.

    Raises:
        ConfigError: there is no room for the smallest possible number of processes; the message has what is missing.
    """
    num_gpus = sum(node.get("GPU", 0.0) for node in nodes.values())
    missing: list[Finding] = []
    for candidate in _candidates(config, len(nodes)):
        placement = placed(candidate, num_gpus) if isinstance(candidate, Config) else candidate
        missing = check_room(nodes, demands(placement, num_gpus))
        if not missing:
            return candidate
    reason = "\n".join(map(str, missing)) or "no smaller number of training workers is possible with these settings"
    raise ConfigError(f"the run cannot continue on the {len(nodes)} nodes that are left: {reason}")


def changes(before: RunConfig, after: RunConfig) -> str:
    """Describe which numbers of processes differ."""
    old, new = _numbers(before), _numbers(after)
    return ", ".join(f"{key}={new[key]} (before: {old[key]})" for key in old if old[key] != new[key])


def _numbers(config: RunConfig) -> dict[str, int]:
    numbers = {"trainer.nnodes": config.trainer.nnodes, "actor.num_workers": config.actor.num_workers}
    if isinstance(config, Config):
        numbers |= {
            "rollout.num_engines": config.rollout.num_engines,
            "episode.num_workers": config.episode.num_workers,
        }
    return numbers


def _candidates(config: ConfigT, num_nodes: int) -> Iterator[ConfigT]:
    """Yield the possible configurations with the same or fewer processes, the best one first."""
    num_workers, nnodes = config.actor.num_workers, min(config.trainer.nnodes, num_nodes)
    for workers in _divisors(num_workers):
        for spread in range(nnodes, 0, -1):
            try:
                smaller = replace(
                    config,
                    actor=replace(config.actor, num_workers=workers),
                    trainer=replace(config.trainer, nnodes=spread),
                )
                config.engine.check(config.model, config.optimizer, workers)
            except ValueError:  # such as parallel sizes that do not divide this number
                continue
            yield from _with_fewer_engines(smaller)


def _with_fewer_engines(config: ConfigT) -> Iterator[ConfigT]:
    if not isinstance(config, Config):
        yield config
        return
    for engines in range(config.rollout.num_engines, 0, -1):
        for episodes in range(config.episode.num_workers, 0, -1):
            yield replace(
                config,
                rollout=replace(config.rollout, num_engines=engines),
                episode=replace(config.episode, num_workers=episodes),
            )


def _divisors(number: int) -> list[int]:
    return [size for size in range(number, 0, -1) if number % size == 0]
