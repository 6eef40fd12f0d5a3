"""Where the time of a step goes: seconds that add up to its wall time."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

_ENGINE = {  # parts of an engine's step, by what `tidemill_engines.throughput.Meter` calls them
    "forward": "forward pass",
    "backward": "backward pass",
    "forward_backward": "forward and backward pass",
    "optimizer": "optimizer",
    "offload": "onload and offload of the trainer",
}
NOTES = {
    "generation": "reward functions run in the episodes, at the same time",
    "waiting for the last episodes": "after 90 % of the episodes have finished",
    "waiting for episodes": "generation runs during the other phases, too (rollout.max_staleness > 0)",
    "onload and offload of the engines": "memory of weights and KV pool, in turns",
    "log-probs": "of the policy and other roles, and scores of a reward model; with their onload and offload",
    "scores and advantages": "in the driver, and metrics of the batch",
    "update of the critic": "while the policy is not trained, which is part of its update",
    "rest of the update": "idle GPUs: the batch is planned, sent to the workers and collected",
    "other": "idle GPUs: ledger, metrics, checks and files in the driver",
}
"""What the name of a phase does not say."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Spread:
    """A number of each measured step in short."""

    min: float
    median: float
    max: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        return cls(min=min(values), median=median(values), max=max(values))


def phase_seconds(metrics: Mapping[str, Any], wall_s: float, *, overlaps: bool) -> dict[str, float]:
    """Return the seconds of each phase of a step; they add up to `wall_s`.

    Args:
        metrics: line of `metrics.jsonl`.
        wall_s: time from the end of the step before to the end of this one.
        overlaps: generation runs during training (`rollout.max_staleness` > 0).
    """
    taken = {name.removeprefix("timing_s/"): value for name, value in metrics.items() if name.startswith("timing_s/")}
    resume, release = metrics.get("rollout/resume_s", 0.0), metrics.get("rollout/release_s", 0.0)
    gen = taken["gen"] - resume - release
    phases = {"waiting for episodes": gen} if overlaps else _generation(metrics, gen)
    offload = metrics.get("weight_update/offload_s", 0.0)
    update, weights = taken["update_actor"], taken["update_weights"] - offload
    parts = {title: metrics.get(f"perf/{part}_s/actor", 0.0) for part, title in _ENGINE.items()}
    parts["update of the critic"] = taken.get("update_critic", 0.0)
    in_turns = "rollout/release_s" in metrics
    sent = min(metrics["weight_update/seconds"], weights) if in_turns else weights
    rest = update - sum(parts.values())
    parts[_ENGINE["offload"]] += offload
    phases |= {
        "log-probs": taken["old_log_prob"],
        "scores and advantages": taken["adv"],
        **parts,
        "rest of the update": rest,
        "weight update": sent,
        "onload and offload of the engines": resume + release + weights - sent,
        "record of the batch": taken.get("save_batch", 0.0),
    }
    phases = {name: seconds for name, seconds in phases.items() if seconds}
    return phases | {"other": wall_s - sum(phases.values())}


def _generation(metrics: Mapping[str, Any], seconds: float) -> dict[str, float]:
    last = min(metrics["episode/seconds/max"] - metrics["episode/seconds/p90"], seconds)
    return {"generation": seconds - last, "waiting for the last episodes": last}


def shares(steps: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the share of each phase in the time of all steps, in descending order; they add up to 1."""
    total = sum(seconds for step in steps for seconds in step.values())
    names = dict.fromkeys(name for step in steps for name in step)
    sums = {name: sum(step.get(name, 0.0) for step in steps) / total for name in names}
    return dict(sorted(sums.items(), key=lambda item: -item[1]))
