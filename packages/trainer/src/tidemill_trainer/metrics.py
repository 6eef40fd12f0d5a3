"""Metrics of a step, with verl's names."""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from tidemill_dataproto import DataProto, ragged

from tidemill_trainer.advantages import frac_zero_std_groups

_RATES = {
    "perf/mfu": "perf/mfu/actor",
    "perf/tflops_per_rank": "perf/tflops/actor",
    "perf/tokens_per_s": "perf/tokens_per_s/actor",
}


def batch_metrics(batch: DataProto, *, max_prompt_length: int, response_length: int) -> dict[str, float]:
    """Compute scores, advantages, lengths and the log-prob difference of rollout and training for a scored batch.

    Args:
        batch: batch with the ragged columns `prompts`, `responses`, `response_mask`, `rollout_log_probs`,
            `old_log_probs`, `entropy` and `advantages`, with `scores`, `rewards`, `acc` [B], and the object column
            `uid`.
        max_prompt_length, response_length: maximum lengths; `clip_ratio` is the fraction of rows that reach them.
    """
    mask = batch["response_mask"].values().bool()
    prompts = ragged.lengths(batch["prompts"]).float()
    responses = ragged.lengths(batch["responses"]).float()
    difference = (batch["rollout_log_probs"].values() - batch["old_log_probs"].values()).abs()[mask]
    return {
        **_spread("critic/score", batch["scores"]),
        **_spread("critic/rewards", batch["rewards"]),
        **_spread("critic/advantages", batch["advantages"].values()[mask]),
        **_spread("response_length", responses),
        "response_length/clip_ratio": (responses >= response_length).float().mean().item(),
        **_spread("prompt_length", prompts),
        "prompt_length/clip_ratio": (prompts >= max_prompt_length).float().mean().item(),
        "actor/entropy": batch["entropy"].values()[mask].mean().item() if len(difference) else 0.0,
        "reward/acc/mean": batch["acc"].mean().item(),
        "reward/frac_zero_std_groups": frac_zero_std_groups(batch["rewards"], batch.non_tensor_batch["uid"]),
        "rollout/log_prob_abs_diff/mean": difference.mean().item() if len(difference) else 0.0,
        "rollout/log_prob_abs_diff/max": difference.max().item() if len(difference) else 0.0,
        "perf/total_num_tokens": float(prompts.sum() + responses.sum()),
    }


def mean_metrics(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Average the metrics of the optimizer steps of a batch, sum up the skipped steps, and add
    `performance_metrics`."""
    names = [name for name in parts[0] if not name.startswith("perf/")]
    means = {name: float(np.mean([part[name] for part in parts])) for name in names}
    means["actor/grad_nonfinite"] = float(np.sum([part["actor/grad_nonfinite"] for part in parts]))
    return means | performance_metrics(parts)


def performance_metrics(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Compute the speed and memory of all optimizer steps of a batch.

    Args:
        parts: metrics of each step, including those of `BaseEngine.performance`.

    Returns:
        "perf/mfu/actor" (omitted if the peak of the device is unknown), "perf/tflops/actor" per rank,
        "perf/tokens_per_s/actor" of all ranks together, and "perf/max_memory_allocated_gb" (in GiB, like verl's) of the
        rank with the highest peak: on a GPU during these steps, on a CPU since the start of the process. Empty if the
        engine reports no performance.
    """
    if "perf/step_s" not in parts[0]:
        return {}
    seconds = [part["perf/step_s"] for part in parts]
    rates = {
        name: float(np.average([part[engine_name] for part in parts], weights=seconds))
        for engine_name, name in _RATES.items()
        if engine_name in parts[0]
    }
    return rates | {"perf/max_memory_allocated_gb": max(part["perf/peak_memory_gib"] for part in parts)}


def validation_metrics(data_source: np.ndarray, acc: torch.Tensor) -> dict[str, float]:
    """Compute `val/accuracy` over all problems, and `val-core/{source}/acc/mean@1` for each data source.

    Args:
        data_source: data source of each problem [B].
        acc: accuracy of one response per problem, float32 [B].
    """
    return {"val/accuracy": acc.mean().item()} | {
        f"val-core/{source}/acc/mean@1": acc[torch.from_numpy(data_source == source)].mean().item()
        for source in sorted(set(data_source))
    }


def _spread(name: str, values: torch.Tensor) -> dict[str, float]:
    if values.numel() == 0:
        return {f"{name}/{kind}": 0.0 for kind in ("mean", "max", "min")}
    values = values.float()
    return {
        f"{name}/mean": values.mean().item(),
        f"{name}/max": values.max().item(),
        f"{name}/min": values.min().item(),
    }
