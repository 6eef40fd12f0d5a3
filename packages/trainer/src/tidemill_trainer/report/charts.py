"""The charts of a report."""

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np

from tidemill_trainer.report.chart import Points, line_chart

_PHASES = ("gen", "reward", "old_log_prob", "update_actor", "update_weights", "testing", "save_checkpoint")
_IF_REPORTED = (  # title, label and metric
    ("Training speed (tokens per second)", "all ranks", "perf/tokens_per_s/actor"),
    ("Training MFU (fraction of peak FLOPs)", "MFU", "perf/mfu/actor"),
    ("Peak training memory (GiB, largest rank)", "memory", "perf/max_memory_allocated_gb"),
    ("Share of the sampled tokens that is trained on", "share", "rollout/trained_token_share"),
)
_SFT = (  # title, metrics by label
    ("Loss", {"training": "train/loss", "validation": "val/loss"}),
    ("Rewards of DPO", {kind: f"val/rewards/{kind}" for kind in ("chosen", "rejected", "margins")}),
    (
        "Pairs with a positive margin (share)",
        {"training": "train/rewards/accuracies", "validation": "val/rewards/accuracies"},
    ),
    ("Learning rate", {"lr": "train/lr"}),
    ("Gradient norm (before clipping)", {"norm": "train/grad_norm"}),
    *((title, {label: name}) for title, label, name in _IF_REPORTED),
)
_IF_ANY = (  # title, and metrics by label; shown if a number is above 0
    ("Failed rewards", {"training": "reward/num_errors", "validation": "val/num_errors"}),
    (
        "Episodes that are not ok",
        {name: f"episode/status/{name}" for name in ("truncated", "model_error", "environment_error")},
    ),
)
_IN_TABLES = ("num_turns", "seconds")  # means of every episode, not returned by it
_MAX_LINES = 8  # lines of a chart that have different colors


def charts(metrics: Sequence[Mapping[str, Any]], links: Mapping[float, str]) -> list[str]:
    """Return the charts of a run.

    Args:
        metrics: lines of `metrics.jsonl`.
        links: addresses of steps, for clicks in the charts.
    """
    if is_sft(metrics):
        found = [(title, {label: _points(metrics, name) for label, name in names.items()}) for title, names in _SFT]
        return [line_chart(title, lines) for title, lines in found if any(lines.values())]
    rl = [row for row in metrics if row.get("phase") == "rl"]
    warmup = [row for row in metrics if row.get("phase") == "sft"]

    def chart(title: str, names: Mapping[str, str], *, log_y: bool = False) -> str:
        return line_chart(title, {label: _points(rl, name) for label, name in names.items()}, log_y=log_y, links=links)

    shown = [
        chart("Reward (batch mean)", {"mean": "critic/score/mean"}),
        line_chart("Held-out accuracy (greedy)", {"accuracy": _validations(metrics)}, links=links),
        chart("Response length (tokens)", {kind: f"response_length/{kind}" for kind in ("mean", "max", "min")}),
        chart(
            "Log-prob difference |rollout - training|",
            {kind: f"rollout/log_prob_abs_diff/{kind}" for kind in ("mean", "max")},
            log_y=True,
        ),
        chart("Seconds per phase", {phase: f"timing_s/{phase}" for phase in _PHASES}),
        chart("Entropy (nats per token)", {"entropy": "actor/entropy"}),
        chart("Gradient norm (before clipping)", {"norm": "actor/grad_norm"}),
    ]
    shown += [chart(title, {label: name}) for title, label, name in _IF_REPORTED if _points(rl, name)]
    for title, names in _IF_ANY:
        if any(number > 0 for name in names.values() for _, number in _points(rl, name)):
            shown.append(chart(title, names))
    if warmup:
        loss = _points(warmup, "sft/loss", lambda row: row["sft/step"])
        shown.append(line_chart("Warm-up: SFT loss", {"loss": loss}))
    return shown


def own_charts(metrics: Sequence[Mapping[str, Any]], links: Mapping[float, str]) -> list[str]:
    """Return a chart for each metric that the episodes or the reward function of a run returned.

    It has a line for each data source; with more than eight of them, one line with their mean.

    Args:
        metrics: lines of `metrics.jsonl`.
        links: addresses of steps, for clicks in the charts.
    """
    shown = []
    for title, names in sorted(_own_metrics(metrics).items()):
        lines = {source: _points(metrics, name) for source, name in sorted(names.items())}
        if len(lines) > _MAX_LINES:
            title += f" (mean of {len(lines)} data sources)"
            lines = {"mean": _mean(lines.values())}
        shown.append(line_chart(title, lines, links=links))
    return shown


def _own_metrics(metrics: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, str]]:
    """Return the names in `metrics.jsonl` of what episodes returned, by their own name and data source."""
    names = sorted({name for row in metrics for name in row})
    sources = [match[1] for name in names if (match := re.fullmatch("episode/(.*)/status/ok", name))]
    found: dict[str, dict[str, str]] = defaultdict(dict)
    for name in names:
        # Data sources may contain slashes, and one may begin with another.
        source = max((each for each in sources if name.startswith(f"episode/{each}/")), key=len, default=None)
        if source is not None and name.endswith("/mean"):
            own = name.removeprefix(f"episode/{source}/").removesuffix("/mean")
            if own not in _IN_TABLES:
                found[own][source] = name
    return found


def _mean(lines: Iterable[Points]) -> Points:
    values: dict[float, list[float]] = defaultdict(list)
    for x, y in chain.from_iterable(lines):
        values[x].append(y)
    return [(x, float(np.mean(values[x]))) for x in sorted(values)]


def is_sft(metrics: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether the metrics are those of `tidemill sft`."""
    return any("train/loss" in row for row in metrics)


def _points(
    rows: Sequence[Mapping[str, Any]], name: str, x: Callable[[Mapping[str, Any]], float] = lambda row: row["step"]
) -> Points:
    return [(x(row), row[name]) for row in rows if row.get(name) is not None]


def _validations(metrics: Sequence[Mapping[str, Any]]) -> Points:
    """Return the last validation of each step; the warm-up is step 0."""
    return sorted(dict(_points(metrics, "val/accuracy")).items())
