"""The result of a benchmark: what its page and its JSON file contain."""

import importlib.metadata
import os
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from tidemill_trainer.bench.decode import decode_bytes, peak_bandwidth
from tidemill_trainer.bench.phases import Spread, phase_seconds, shares
from tidemill_trainer.bench.sampler import Sampler, gpu_facts
from tidemill_trainer.config import Config
from tidemill_trainer.metrics import QUANTILES
from tidemill_trainer.plan.model import ModelSizes

_PACKAGES = ("tidemill-trainer", "tidemill-engines", "torch", "sglang", "ray", "transformers", "megatron-core")


def measure(
    config: Config,
    model: ModelSizes,
    lines: Sequence[Mapping[str, Any]],
    ends_s: Sequence[float],
    num_gpus: float,
) -> dict[str, Any]:
    """Return the figures of the measured steps.

    Args:
        config: configuration of the run, `placed`.
        model: sizes of the model.
        lines: lines of `metrics.jsonl` of the last warm-up step and of the measured ones.
        ends_s: when each of these steps ended.
        num_gpus: GPUs that engines and training workers use; 0 on a CPU.
    """
    peak = peak_bandwidth(gpu_facts().get("gpu")) if num_gpus else None
    overlaps = config.rollout.max_staleness > 0
    steps = []
    for number in range(1, len(lines)):
        line, wall_s = lines[number], ends_s[number] - ends_s[number - 1]
        counts = {
            kind: line[f"ledger/tokens/{kind}"] - lines[number - 1][f"ledger/tokens/{kind}"]
            for kind in ("generated", "trained", "dropped", "failed")
        }
        phases = phase_seconds(line, wall_s, overlaps=overlaps)
        rates = {
            "seconds": wall_s,
            "tokens/s": line["perf/total_num_tokens"] / wall_s,
            "sampled tokens/s": counts["generated"] / wall_s,
            "training MFU": line.get("perf/mfu/actor"),
        }
        if num_gpus:
            rates["tokens/s/GPU"] = rates["tokens/s"] / num_gpus
        if not overlaps and config.episode.function == "single_turn":
            decoding_s = phases.get("generation", 0.0) + phases.get("waiting for the last episodes", 0.0)
            read = decode_bytes(config, model, line, counts["generated"]) / decoding_s
            rates["GB/s read while decoding, per device of an engine"] = read / 1e9 / _engine_gpus(config)
            share = None if peak is None else read / peak / _engine_gpus(config)
            rates["share of peak memory bandwidth while decoding"] = share
        steps.append({"step": line["step"], "phases": phases, "tokens": counts, "rates": rates})
    names = dict.fromkeys(name for step in steps for name in step["phases"])
    return {
        "num_gpus": num_gpus,
        "rates": {name: _spread([step["rates"][name] for step in steps]) for name in steps[0]["rates"]},
        "phase_shares": shares([step["phases"] for step in steps]),
        "phase_seconds": {name: _spread([step["phases"].get(name, 0.0) for step in steps]) for name in names},
        "tokens": {kind: _spread([step["tokens"][kind] for step in steps]) for kind in steps[0]["tokens"]},
        "response_length": _lengths(lines[1:]),
        "peak_torch_gib_of_update": max(line.get("perf/max_memory_allocated_gb", 0.0) for line in lines[1:]),
        "steps": steps,
    }


def facts(config: Config, arguments: Sequence[str], warmup: int, sampler: Sampler) -> dict[str, Any]:
    """Return what the figures depend on: command, seed, machine and versions; and memory and CPU time by process."""
    return {
        "command": shlex.join(["tidemill", *arguments]),
        "date": time.strftime("%Y-%m-%d"),
        "commit": _commit(),
        "seed": config.trainer.seed,
        "warmup_steps": warmup,
        "placement": config.placement.engines,
        "machine": {
            **gpu_facts(),
            "host": platform.machine(),
            "cpus": len(os.sched_getaffinity(0)),
            "cuda": torch.version.cuda,
        },
        "versions": {"python": sys.version.split()[0], **dict(_versions())},
        "peak_memory_gib": sampler.peaks(),
        "busy_cores": sampler.busy_cores(),
    }


def _engine_gpus(config: Config) -> int:
    return config.rollout.num_engines * config.rollout.tensor_parallel_size


def _spread(values: Sequence[float | None]) -> dict[str, float] | None:
    known = [value for value in values if value is not None]
    return asdict(Spread.of(known)) if known else None


def _lengths(lines: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return minimum and maximum over all steps, and means of the other figures of the steps."""
    names = ("mean", "std", *(f"p{percent}" for percent in QUANTILES))
    means = {name: sum(line[f"response_length/{name}"] for line in lines) / len(lines) for name in names}
    shortest, longest = (
        pick(line[f"response_length/{name}"] for line in lines) for name, pick in (("min", min), ("max", max))
    )
    return {"min": shortest, **means, "max": longest}


def _versions() -> list[tuple[str, str]]:
    found = []
    for name in _PACKAGES:
        try:
            found.append((name, importlib.metadata.version(name)))
        except importlib.metadata.PackageNotFoundError:  # optional, or not installed from a wheel
            continue
    return found


def _commit() -> str | None:
    """Return the commit of the clone that this code is in, with "+" for uncommitted changes; None without git."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty=+", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
