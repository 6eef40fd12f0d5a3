"""Statistics of an evaluation: mean@n and pass@k with confidence intervals, per data source."""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from tidemill_trainer.rollout.episode_task import EpisodeSummary

_Z = 1.959964  # 95 %
TOTAL = "all"


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """A mean over problems with its 95 % confidence interval.

    Attributes:
        mean, low, high: the mean and the bounds of the interval.
        num_problems: number of problems.
    """

    mean: float
    low: float
    high: float
    num_problems: int


def estimate(values: Sequence[float] | np.ndarray) -> Estimate:
    """Estimate the mean of values in [0, 1], one per problem.

    The interval is Wilson's (1927) with the effective number of problems p(1 - p) / variance of the mean (Kish 1965):
    for values of 0 and 1 that is the number of problems. Problems are independent; the samples of one are not, so they
    enter as their mean. For values outside of [0, 1], such as rewards, it is mean +- 1.96 standard errors.
    """
    array = np.asarray(values, dtype=np.float64)
    count, mean = len(array), float(array.mean())
    variance = float(array.var()) / count  # of the mean
    if array.min() < 0 or array.max() > 1:
        error = _Z * math.sqrt(variance)
        return Estimate(mean=mean, low=mean - error, high=mean + error, num_problems=count)
    is_equal = array.min() == array.max()  # then only rounding makes a variance
    effective = float(count) if is_equal else mean * (1 - mean) / variance
    center = (mean + _Z**2 / (2 * effective)) / (1 + _Z**2 / effective)
    error = _Z / (1 + _Z**2 / effective) * math.sqrt(mean * (1 - mean) / effective + _Z**2 / (4 * effective**2))
    return Estimate(mean=mean, low=max(0.0, center - error), high=min(1.0, center + error), num_problems=count)


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """Return the probability that one of k of these samples is correct (Chen et al. 2021, arXiv:2107.03374)."""
    return 1.0 - math.comb(num_samples - num_correct, k) / math.comb(num_samples, k)


def evaluate_summaries(summaries: Sequence[EpisodeSummary], n: int) -> dict[str, dict[str, Any]]:
    """Compute the results of each data source and of all problems together ("all").

    If a data source has the name "all", the results of all problems are "all sources".

    Args:
        summaries: `n` episodes per problem. Failed ones are counted and left out.
        n: samples per problem.

    Returns:
        For each source `num_episodes`, `num_failed`, and as `Estimate`s in dicts `acc/mean@n`, `reward/mean@n` and
        `acc/pass@k` for k = 1, 2, 4, ... up to n; a sample is correct if its accuracy is 1. A problem with fewer than k
        sound samples is not in pass@k.
    """
    by_source: dict[str, list[EpisodeSummary]] = defaultdict(list)
    for summary in summaries:
        by_source[summary.task.problem.data_source].append(summary)
    groups = dict(sorted(by_source.items()))
    if len(groups) > 1:
        groups[TOTAL if TOTAL not in groups else f"{TOTAL} sources"] = list(summaries)
    return {source: _results(group, n) for source, group in groups.items()}


def _results(summaries: Sequence[EpisodeSummary], n: int) -> dict[str, Any]:
    by_problem: dict[str, list[EpisodeSummary]] = defaultdict(list)
    for summary in summaries:
        if summary.outcome.is_trainable:
            by_problem[summary.task.problem.id].append(summary)
    results: dict[str, Any] = {
        "num_episodes": len(summaries),
        "num_failed": sum(not summary.outcome.is_trainable for summary in summaries),
    }
    if not by_problem:
        return results
    accuracies = [[each.acc for each in group] for group in by_problem.values()]
    rewards = [[each.outcome.reward for each in group] for group in by_problem.values()]
    results[f"acc/mean@{n}"] = asdict(estimate([float(np.mean(group)) for group in accuracies]))
    results[f"reward/mean@{n}"] = asdict(estimate([float(np.mean(group)) for group in rewards]))
    for k in (2**power for power in range(n.bit_length())):
        values = [pass_at_k(len(group), sum(acc >= 1.0 for acc in group), k) for group in accuracies if len(group) >= k]
        if values:
            results[f"acc/pass@{k}"] = asdict(estimate(values))
    return results
