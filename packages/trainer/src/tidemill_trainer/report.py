"""`report.html`: charts, rollouts and configuration of a run in one self-contained file."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from html import escape
from typing import Any

from tidemill_trainer.chart import Points, line_chart
from tidemill_trainer.run_dir import RunDir

_PHASES = ("gen", "reward", "old_log_prob", "update_actor", "update_weights", "testing", "save_checkpoint")
_NUM_ROLLOUTS = 40

_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<style>
:root {{
  color-scheme: light dark;
  --ink: #222; --soft: #777; --line: #ddd; --page: #fff; --good: #2e7d32;
}}
@media (prefers-color-scheme: dark) {{
  :root {{ --ink: #e6e6e6; --soft: #999; --line: #3a3a3a; --page: #191919; --good: #81c784; }}
}}
body {{
  font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 1000px; padding: 0 1rem;
  color: var(--ink); background: var(--page);
}}
h1 {{ margin-bottom: 0; }}
.sub {{ color: var(--soft); margin-top: 0; }}
.charts {{ display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 400px), 1fr)); gap: 1rem; }}
svg {{ width: 100%; border: 1px solid var(--line); border-radius: 6px; }}
svg polyline {{ fill: none; stroke-width: 1.8; stroke-linejoin: round; }}
svg text {{ font: 11px system-ui, sans-serif; }}
.grid {{ stroke: var(--line); }}
.title {{ font-size: 14px; font-weight: 600; fill: var(--ink); }}
.tick-x, .tick-y, .empty {{ fill: var(--soft); }}
.tick-y {{ text-anchor: end; }}
.tick-x, .empty {{ text-anchor: middle; }}
table {{ border-collapse: collapse; width: 100%; }}
th, td {{ text-align: left; vertical-align: top; padding: .25rem .6rem; border-bottom: 1px solid var(--line); }}
.text {{
  font-family: ui-monospace, monospace; white-space: pre-wrap; overflow-wrap: anywhere;
  max-height: 15rem; overflow-y: auto;
}}
.good {{ color: var(--good); }}
pre {{ overflow-x: auto; border: 1px solid var(--line); border-radius: 6px; padding: .8rem; font-size: 13px; }}
</style></head><body>
<h1>{title}</h1><p class="sub">{summary}</p>
<div class="charts">{charts}</div>
<h2>Rollouts</h2>{about}
<table><thead><tr><th>step</th><th>prompt</th><th>response</th><th>ground truth</th><th>score</th></tr></thead>
<tbody>{rollouts}</tbody></table>
<h2>Configuration</h2><pre>{config}</pre>
</body></html>
"""


def write_report(run: RunDir) -> None:
    """Write `run.report` from metrics, rollouts and configuration of the run."""
    metrics = run.read_metrics()
    page = _PAGE.format(
        title=escape(run.path.name),
        summary=escape(_summary(metrics)),
        charts="".join(_charts(metrics)),
        about=f"<p>{escape(run.about.read_text())}</p>" if run.about.is_file() else "",
        rollouts="".join(_rollout_rows(run.read_rollouts())),
        config=escape(run.config.read_text()),
    )
    partial = run.report.with_suffix(".partial")
    partial.write_text(page, encoding="utf-8")
    partial.replace(run.report)


def _summary(metrics: Sequence[dict[str, Any]]) -> str:
    steps = [row["step"] for row in metrics if row.get("phase") == "rl"]
    accuracies = [row["val/accuracy"] for row in metrics if "val/accuracy" in row]
    text = f"{max(steps, default=0)} steps"
    if accuracies:
        before = [row["val/accuracy"] for row in metrics if "val/accuracy" in row and row["step"] == 0][-1:]
        text += (
            f", held-out accuracy {before[0] if before else accuracies[0]:.3f} before and {accuracies[-1]:.3f} after "
            "reinforcement learning"
        )
    return text


def _charts(metrics: Sequence[dict[str, Any]]) -> list[str]:
    rl = [row for row in metrics if row.get("phase") == "rl"]
    warmup = [row for row in metrics if row.get("phase") == "sft"]
    charts = [
        line_chart("Reward (batch mean)", {"mean": _points(rl, "critic/score/mean")}),
        line_chart("Held-out accuracy (greedy)", {"accuracy": _validations(metrics)}),
        line_chart(
            "Response length (tokens)", {k: _points(rl, f"response_length/{k}") for k in ("mean", "max", "min")}
        ),
        line_chart(
            "Log-prob difference |rollout - training|",
            {kind: _points(rl, f"rollout/log_prob_abs_diff/{kind}") for kind in ("mean", "max")},
            log_y=True,
        ),
        line_chart("Seconds per phase", {phase: _points(rl, f"timing_s/{phase}") for phase in _PHASES}),
        line_chart("Entropy (nats per token)", {"entropy": _points(rl, "actor/entropy")}),
        line_chart("Gradient norm (before clipping)", {"norm": _points(rl, "actor/grad_norm")}),
    ]
    charts += [
        line_chart(title, {label: line})
        for title, label, name in (
            ("Training speed (tokens per second)", "all ranks", "perf/tokens_per_s/actor"),
            ("Training MFU (fraction of peak FLOPs)", "MFU", "perf/mfu/actor"),
            ("Peak training memory (GiB, largest rank)", "memory", "perf/max_memory_allocated_gb"),
        )
        if (line := _points(rl, name))
    ]
    errors = {"training": _points(rl, "reward/num_errors"), "validation": _points(rl, "val/num_errors")}
    if any(number > 0 for line in errors.values() for _, number in line):
        charts.append(line_chart("Failed rewards", errors))
    if warmup:
        loss = _points(warmup, "sft/loss", lambda row: row["sft/step"])
        charts.append(line_chart("Warm-up: SFT loss", {"loss": loss}))
    return charts


def _points(
    rows: Sequence[dict[str, Any]], name: str, x: Callable[[dict[str, Any]], float] = lambda row: row["step"]
) -> Points:
    return [(x(row), row[name]) for row in rows if row.get(name) is not None]


def _validations(metrics: Sequence[dict[str, Any]]) -> Points:
    """Return the last validation of each step; the warm-up is step 0."""
    return sorted({row["step"]: row["val/accuracy"] for row in metrics if "val/accuracy" in row}.items())


def _rollout_rows(rollouts: Sequence[dict[str, Any]]) -> list[str]:
    """Return table rows of some rollouts, spread evenly over the run."""
    by_step: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for row in rollouts:
        by_step[row["step"]].append(row)
    count = max(2, _NUM_ROLLOUTS // max(1, len(next(iter(by_step.values()), []))))
    steps = sorted(by_step)
    shown = sorted({steps[number * (len(steps) - 1) // max(1, count - 1)] for number in range(count)}) if steps else []
    rows = []
    for row in (row for step in shown for row in by_step[step]):
        texts = "".join(
            f'<td><div class="text">{escape(str(row[name]))}</div></td>'
            for name in ("prompt", "response", "ground_truth")
        )
        style = ' class="good"' if row["acc"] >= 1 else ""
        rows.append(f"<tr><td>{row['step']}</td>{texts}<td{style}>{row['score']:g}</td></tr>")
    return rows
