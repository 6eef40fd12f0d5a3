"""Metrics of a step, with verl's names."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import get_args

import numpy as np
import torch
from tidemill_algorithms import Groups
from tidemill_dataproto import DataProto, ragged
from tidemill_rollout.outcome import Status

from tidemill_trainer.episodes import EpisodeError
from tidemill_trainer.rollout.episode_task import Episodes, EpisodeSummary

QUANTILES = (10, 25, 50, 75, 90, 99)
"""Percentiles of the response lengths of a step."""
RM_SCORE = "rm_score"
"""The metric of an episode's outcome that has the score of the reward model."""
_RATES = {
    "perf/mfu": "perf/mfu/actor",
    "perf/tflops_per_rank": "perf/tflops/actor",
    "perf/tokens_per_s": "perf/tokens_per_s/actor",
}


def batch_metrics(
    batch: DataProto, scored: DataProto, *, max_prompt_length: int, response_length: int
) -> dict[str, float]:
    """Compute scores, advantages and lengths of a batch.

    Args:
        batch: rows with the ragged columns `prompts`, `responses`, `response_mask`, `advantages` and, without
            `algorithm.bypass_mode`, `entropy`; and the columns of `Groups.of`, with `episode` and `rewards` [B].
        scored: episodes with `scores` and `acc` [E].
        max_prompt_length, response_length: maximum lengths; `clip_ratio` is the fraction of rows that reach them.
    """
    mask = batch["response_mask"].values().bool()
    prompts = ragged.lengths(batch["prompts"]).float()
    responses = ragged.lengths(batch["responses"]).float()
    return {
        **_spread("critic/score", scored["scores"]),
        **_spread("critic/rewards", batch["rewards"][_first_rows(batch["episode"])]),
        **_spread("critic/advantages", batch["advantages"].values()[mask]),
        **_spread("response_length", responses),
        **_quantiles("response_length", responses),
        "response_length/clip_ratio": (responses >= response_length).float().mean().item(),
        **_spread("prompt_length", prompts),
        "prompt_length/clip_ratio": (prompts >= max_prompt_length).float().mean().item(),
        **({"actor/entropy": _mean(batch["entropy"].values()[mask])} if "entropy" in batch.batch else {}),
        "reward/acc/mean": scored["acc"].mean().item(),
        "reward/frac_zero_std_groups": _frac_zero_std_groups(Groups.of(batch)),
        "perf/total_num_tokens": float(prompts.sum() + responses.sum()),
    }


def reward_components(summaries: Sequence[EpisodeSummary], names: Sequence[str]) -> torch.Tensor:
    """Return metrics of the outcomes as rewards, float32 [E, K]; 0 for what an episode without a result lacks.

    Raises:
        EpisodeError: an outcome with status "ok" lacks one of them.
    """
    for summary in summaries:
        missing = [name for name in names if name not in summary.outcome.metrics]
        if missing and summary.outcome.status == "ok":
            raise EpisodeError(
                f"episode {summary.task.name}: algorithm.reward_components requires the metrics {', '.join(names)} in "
                f"each outcome, but {', '.join(missing)} is missing; return it in the dict of the reward function"
            )
    return torch.tensor([[summary.outcome.metrics.get(name, 0.0) for name in names] for summary in summaries])


def critic_metrics(batch: DataProto) -> dict[str, float]:
    """Compute `critic/values`, `critic/returns` and the share of the returns' variance that the values explain.

    Args:
        batch: rows with the ragged columns `response_mask`, `values` and `returns`.
    """
    mask = batch["response_mask"].values().bool()
    values, returns = (batch[name].values()[mask] for name in ("values", "returns"))
    explained = 1.0 - (returns - values).var() / returns.var().clamp(min=1e-8) if len(values) > 1 else torch.zeros(())
    return {
        **_spread("critic/values", values),
        **_spread("critic/returns", returns),
        "critic/vf_explained_var": explained.item(),
    }


def episode_metrics(episodes: Episodes, num_trained_tokens: int) -> dict[str, float]:
    """Compute how episodes ended and how long they took, in total and per data source.

    Args:
        episodes: the episodes of a step.
        num_trained_tokens: tokens with mask 1 in the batch.
    """
    summaries = episodes.summaries
    reasons = Counter(kind_of(summary.outcome.reason) for summary in summaries if summary.outcome.status != "ok")
    every = [*summaries, *episodes.baselines]
    num_errors = sum(each.outcome.status == "environment_error" for each in every)
    forks: Counter[str] = Counter()
    for summary in summaries:
        forks.update({name: int(count) for name, count in summary.counts.items() if name.startswith("num_forks/")})
    sampled = sum(
        summary.counts.get("num_sampled_tokens", 0.0) for summary in summaries if summary.outcome.is_trainable
    )
    seconds_of_all = np.array([summary.seconds for summary in summaries])
    metrics = {
        **_by_status("episode/status", summaries),
        **{f"episode/reason/{reason}": float(count) for reason, count in sorted(reasons.items())},
        "reward/num_errors": float(num_errors),
        "episode/num_retries": float(sum(len(each.failures) for each in every) - num_errors),
        "episode/num_worker_restarts": float(episodes.num_restarts),
        "episode/seconds/p90": float(np.quantile(seconds_of_all, 0.9)),
        "episode/seconds/max": float(seconds_of_all.max()),
        "rollout/trained_token_share": num_trained_tokens / sampled if sampled else 0.0,
        **{f"rollout/{name}": float(count) for name, count in sorted(forks.items())},
    }
    for source, group in _by_source(summaries).items():
        names = {name for summary in group for name in summary.outcome.metrics} - {"acc"}
        for name in sorted(names):
            values = [each.outcome.metrics[name] for each in group if name in each.outcome.metrics]
            metrics[f"episode/{source}/{name}/mean"] = float(np.mean(values))
        seconds = np.array([summary.seconds for summary in group])
        metrics |= _by_status(f"episode/{source}/status", group) | {
            f"episode/{source}/seconds/mean": float(seconds.mean()),
            f"episode/{source}/seconds/p50": float(np.quantile(seconds, 0.5)),
            f"episode/{source}/seconds/p95": float(np.quantile(seconds, 0.95)),
            f"episode/{source}/num_turns/mean": float(np.mean([each.counts.get("num_turns", 0.0) for each in group])),
        }
    return metrics


def mean_metrics(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Average the metrics of the optimizer steps of a batch, sum up the skipped steps, and add
    `performance_metrics`."""
    names = [name for name in parts[0] if not name.startswith("perf/")]
    means = {name: float(np.mean([part[name] for part in parts])) for name in names}
    skipped = {name: value * len(parts) for name, value in means.items() if name.endswith("/grad_nonfinite")}
    return means | skipped | performance_metrics(parts)


def performance_metrics(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Compute the speed and memory of all optimizer steps of a batch.

    Args:
        parts: metrics of each step, including those of `BaseEngine.performance`.

    Returns:
        "perf/mfu/actor" (omitted if the peak of the device is unknown), "perf/tflops/actor" per rank,
        "perf/tokens_per_s/actor" of all ranks together, and "perf/max_memory_allocated_gb" (in GiB, like verl's) of the
        rank with the highest peak: on a GPU during these steps, on a CPU since the start of the process. Also the sums
        of the seconds of steps and their parts, such as "perf/step_s/actor" and "perf/forward_s/actor". Empty if the
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
    names = sorted({name for part in parts for name in part if name.startswith("perf/") and name not in _RATES})
    sums = {f"{name}/actor": sum(part.get(name, 0.0) for part in parts) for name in names if name.endswith("_s")}
    return rates | sums | {"perf/max_memory_allocated_gb": max(part["perf/peak_memory_gib"] for part in parts)}


def validation_metrics(summaries: Sequence[EpisodeSummary]) -> dict[str, float]:
    """Compute `val/accuracy` over all problems, and `val-core/{source}/acc/mean@1` for each data source.

    With a reward model, also `val/rm_score/mean`.

    Args:
        summaries: one episode per problem. Those that failed are counted in `val/num_errors` only; where all failed,
            there is no accuracy.
    """
    sound = [summary for summary in summaries if summary.outcome.is_trainable]
    metrics = {"val/num_errors": float(len(summaries) - len(sound))}
    if not sound:
        return metrics
    metrics |= {"val/accuracy": _accuracy(sound)} | {
        f"val-core/{source}/acc/mean@1": _accuracy(group) for source, group in _by_source(sound).items()
    }
    scores = [summary.outcome.metrics[RM_SCORE] for summary in sound if RM_SCORE in summary.outcome.metrics]
    return metrics | ({f"val/{RM_SCORE}/mean": float(np.mean(scores))} if scores else {})


def _frac_zero_std_groups(groups: Groups) -> float:
    """Return the share of groups whose rewards are all equal, so that they have no gradient."""
    spread = groups.sum(groups.centred(groups.rewards).abs())
    return (spread <= 1e-6).float().mean().item()


def kind_of(reason: str) -> str:
    """Return the first word of a reason, such as "ValueError" or "turns": texts are too many for a metric each."""
    return next(iter(reason.replace(":", " ", 1).split()), "unknown")


def _first_rows(episode: torch.Tensor) -> torch.Tensor:
    """Return the index of one row of each episode."""
    return torch.from_numpy(np.unique(episode.numpy(), return_index=True)[1])


def _mean(values: torch.Tensor) -> float:
    return values.mean().item() if len(values) > 0 else 0.0


def _accuracy(summaries: Sequence[EpisodeSummary]) -> float:
    return torch.tensor([summary.acc for summary in summaries], dtype=torch.float32).mean().item()


def _by_status(name: str, summaries: Sequence[EpisodeSummary]) -> dict[str, float]:
    counts = Counter(summary.outcome.status for summary in summaries)
    return {f"{name}/{status}": float(counts[status]) for status in get_args(Status)}


def _by_source(summaries: Sequence[EpisodeSummary]) -> dict[str, list[EpisodeSummary]]:
    groups: dict[str, list[EpisodeSummary]] = {}
    for summary in summaries:
        groups.setdefault(summary.task.problem.data_source, []).append(summary)
    return dict(sorted(groups.items()))


def _quantiles(name: str, values: torch.Tensor) -> dict[str, float]:
    """Return the standard deviation, and quantiles from which `bench.lengths` replays the distribution."""
    if values.numel() == 0:
        return {}
    found = torch.quantile(values, torch.tensor(QUANTILES) / 100).tolist()
    std = {f"{name}/std": values.std(correction=0).item()}
    return std | {f"{name}/p{percent}": value for percent, value in zip(QUANTILES, found, strict=True)}


def _spread(name: str, values: torch.Tensor) -> dict[str, float]:
    if values.numel() == 0:
        return {f"{name}/{kind}": 0.0 for kind in ("mean", "max", "min")}
    values = values.float()
    return {
        f"{name}/mean": values.mean().item(),
        f"{name}/max": values.max().item(),
        f"{name}/min": values.min().item(),
    }
