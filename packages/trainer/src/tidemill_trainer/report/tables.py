"""Tables of a run: outcomes, latency per environment, ledger and forks."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any, get_args

import numpy as np
from tidemill_rollout.outcome import Status

from tidemill_trainer.report.elements import html_table, table, text_block
from tidemill_trainer.report.episode import Outcome

_TOTALS = ("issued", "generated")  # the other counts of the ledger are the places where these are
_STATUSES = get_args(Status)
_MEANS = {  # metric of an environment and its column
    "seconds/mean": "seconds: mean",
    "seconds/p50": "median",
    "seconds/p95": "p95",
    "num_turns/mean": "turns",
}
Metrics = Sequence[Mapping[str, Any]]


def outcome_tables(outcomes: Sequence[Outcome], metrics: Metrics) -> str:
    """Return counts of all episodes, and statistics of each environment. Empty for a run without environments."""
    status, reasons = _sums(metrics, "episode/status/"), _sums(metrics, "episode/reason/")
    retries = sum(row.get("episode/num_retries") or 0 for row in metrics)
    html = ""
    if status:
        rows = [*status.items(), *((f"reason: {name}", count) for name, count in reasons.items()), ("retries", retries)]
        html += "<h3>All episodes</h3>" + table(("outcome", "number"), [(name, _cell(count)) for name, count in rows])
    if environments := _environment_rows(metrics):
        head = ("environment", *(name.replace("_", " ") for name in _STATUSES), *_MEANS.values())
        html += "<h3>All episodes by environment; seconds and turns are means over the steps</h3>"
        html += table(head, environments)
    if any(outcome.data_source for outcome in outcomes):
        html += f"<h3>The {len(outcomes)} saved episodes by environment</h3>" + _saved_table(outcomes)
    return html and f"<h2>Outcomes</h2>{html}"


def ledger_table(metrics: Metrics) -> str:
    """Return the last counts of the ledger, with the number that is in no place; empty for a run without a ledger."""
    last: dict[str, dict[str, float]] = defaultdict(dict)
    for row in metrics:
        for name, value in row.items():
            if name.startswith("ledger/"):
                _, kind, place = name.split("/", 2)
                last[kind][place] = value
    if not last:
        return ""
    places = list(dict.fromkeys(place for counts in last.values() for place in counts if place not in _TOTALS))
    rows = []
    for kind, counts in last.items():
        total = sum(counts.get(name, 0.0) for name in _TOTALS)
        missing = total - sum(counts.get(place, 0.0) for place in places)
        rows.append((kind, _cell(total), *(_cell(counts.get(place)) for place in places), _cell(missing)))
    head = ("", "total", *(place.replace("_", " ") for place in places), "unaccounted for")
    return f"<h2>Ledger</h2>{table(head, rows)}"


def forks_html(forks: Iterable[Mapping[str, Any]], metrics: Metrics) -> str:
    """Return how often a request could not continue its token sequence, by reason, with one example each."""
    counts = _sums(metrics, "rollout/num_forks/")
    examples: dict[str, Mapping[str, Any]] = {}
    for fork in forks:
        examples.setdefault(str(fork["reason"]), fork)
    rows = []
    for reason in dict.fromkeys([*counts, *examples]):
        example = examples.get(reason)
        rows.append((escape(reason), _cell(counts.get(reason)), "" if example is None else _fork(example)))
    if not rows:
        return ""
    about = "<p>Requests that could not continue a token sequence and started another one.</p>"
    return f"<h2>Forks</h2>{about}{html_table(('reason', 'number', 'example'), rows)}"


def _fork(fork: Mapping[str, Any]) -> str:
    where = escape(f"step {fork['step']}, episode {fork['episode']}")
    texts = "".join(text_block(name, str(fork[name])) for name in ("expected", "received"))
    return f"<details><summary>{where}</summary>{texts}</details>"


def _sums(metrics: Metrics, prefix: str) -> dict[str, float]:
    """Return the sums over all steps of the metrics with this prefix, without it; only those that are not 0."""
    sums: Counter[str] = Counter()
    for row in metrics:
        for name, value in row.items():
            if name.startswith(prefix) and isinstance(value, int | float):
                sums[name.removeprefix(prefix)] += value  # type: ignore[assignment]
    return {name: value for name, value in sums.items() if value}


def _environment_rows(metrics: Metrics) -> list[tuple[str, ...]]:
    values: dict[str, list[float]] = defaultdict(list)
    for row in metrics:
        for name, value in row.items():
            if name.startswith("episode/") and value is not None:
                values[name].append(value)
    suffix = "/seconds/mean"
    sources = [name.removeprefix("episode/").removesuffix(suffix) for name in values if name.endswith(suffix)]
    sums = {name: sum(numbers) for name, numbers in values.items()}
    means = {name: float(np.mean(numbers)) for name, numbers in values.items()}
    return [
        (
            source,
            *(_cell(sums.get(f"episode/{source}/status/{name}")) for name in _STATUSES),
            *(_cell(means.get(f"episode/{source}/{name}")) for name in _MEANS),
        )
        for source in sources
    ]


def _saved_table(outcomes: Sequence[Outcome]) -> str:
    by_source: dict[str, list[Outcome]] = defaultdict(list)
    for outcome in outcomes:
        by_source[outcome.data_source].append(outcome)
    rows = []
    for source in sorted(by_source):
        results: dict[tuple[str, str], list[Outcome]] = defaultdict(list)
        for outcome in by_source[source]:
            results[outcome.status, outcome.reason.partition(":")[0]].append(outcome)
        for place, ((status, reason), same) in enumerate(sorted(results.items(), key=lambda item: -len(item[1]))):
            seconds = [outcome.seconds for outcome in same if outcome.seconds is not None]
            turns, tokens = (
                [outcome.metrics[name] for outcome in same if name in outcome.metrics]
                for name in ("num_turns", "num_sampled_tokens")
            )
            cells = (
                *(_cell(float(np.percentile(seconds, q)) if seconds else None) for q in (50, 95)),
                *(_cell(float(np.mean(numbers)) if numbers else None) for numbers in (turns, tokens)),
            )
            mean = _cell(float(np.mean(seconds)) if seconds else None)
            rows.append(("" if place else source, status, reason, str(len(same)), mean, *cells))
    head = (
        "environment",
        "status",
        "reason",
        "episodes",
        "seconds: mean",
        "median",
        "p95",
        "mean turns",
        "mean tokens",
    )
    return table(head, rows)


def _cell(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.0f}" if float(value).is_integer() else f"{value:.4g}"
