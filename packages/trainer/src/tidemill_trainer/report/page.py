"""The page with charts, tables, episodes and configuration of a run."""

from collections.abc import Mapping, Sequence
from html import escape
from importlib.resources import files
from typing import Any

from tidemill_trainer import report
from tidemill_trainer.report.charts import charts, is_sft, own_charts
from tidemill_trainer.report.episode import Episode, Outcome, choose
from tidemill_trainer.report.episodes import episodes_html, step_anchor
from tidemill_trainer.report.tables import forks_html, ledger_table, outcome_tables
from tidemill_trainer.run_dir import RunDir

# The policy forbids scripts and every address outside of the page, in addition to escaping all data.
_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title>
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<style>
{style}</style></head><body>
<h1>{title}</h1><p class="sub">{summary}</p>
<div class="charts">{charts}</div>
{content}
<h2>Configuration</h2><pre>{config}</pre>
</body></html>
"""
_CLICK = '<p class="sub">A click in a chart goes to the saved episodes of the nearest marked step.</p>'
_OWN = """<h2>Metrics of episodes and reward functions</h2>
<p class="sub">Mean of the episodes of a step that returned the metric, for each data source.</p>
<div class="charts">{charts}</div>
"""


def write_report(run: RunDir) -> None:
    """Write `run.report` from metrics, episodes, forks and configuration of the run."""
    metrics = run.read_metrics()
    about = f"<p>{escape(run.about.read_text())}</p>" if run.about.is_file() else ""
    links, content = ({}, about) if is_sft(metrics) else _episodes(run, metrics, about)
    page = _PAGE.format(
        title=escape(run.path.name),
        style=files(report).joinpath("report.css").read_text(encoding="utf-8"),
        summary=escape(_summary(metrics)),
        charts="".join(charts(metrics, links)),
        content=content,
        config=escape(run.config.read_text()),
    )
    partial = run.report.with_suffix(".partial")
    # A sampled text may contain half of a surrogate pair, which UTF-8 does not have.
    partial.write_text(page, encoding="utf-8", errors="backslashreplace")
    partial.replace(run.report)


def _episodes(run: RunDir, metrics: Sequence[Mapping[str, Any]], about: str) -> tuple[dict[float, str], str]:
    """Return the addresses of steps, and the HTML of own metrics, tables and episodes."""
    # Episodes with all their tokens may not fit into memory, so the file is read twice.
    outcomes = [Outcome.of(line) for line in run.iter_rollouts()]
    chosen = choose(outcomes)
    episodes = [Episode.of(line) for index, line in enumerate(run.iter_rollouts()) if index in chosen]
    links = {float(episode.outcome.step): f"#{step_anchor(episode.outcome.step)}" for episode in episodes}
    own = own_charts(metrics, links)
    own_html = _OWN.format(charts="".join(own)) if own else ""
    tables = outcome_tables(outcomes, metrics) + ledger_table(metrics) + forks_html(run.read_forks(), metrics)
    shown = episodes_html(episodes, len(outcomes), {row["step"]: row for row in metrics})
    return links, f"{own_html}{_CLICK}\n{tables}<h2>Episodes</h2>{about}{shown}"


def _summary(metrics: Sequence[Mapping[str, Any]]) -> str:
    if is_sft(metrics):
        text = f"{max(row['step'] for row in metrics)} steps"
        losses = [row["val/loss"] for row in metrics if row.get("val/loss") is not None]
        if len(losses) > 1:
            text += f", validation loss {losses[0]:.3f} before and {losses[-1]:.3f} after training"
        return text
    steps = [row["step"] for row in metrics if row.get("phase") == "rl"]
    accuracies = [(row["step"], row["val/accuracy"]) for row in metrics if row.get("val/accuracy") is not None]
    text = f"{max(steps, default=0)} steps"
    if accuracies:
        before = [accuracy for step, accuracy in accuracies if step == 0][-1:]
        step, last = accuracies[-1]
        if before and step > 0:
            text += f", held-out accuracy {before[0]:.3f} before and {last:.3f} after reinforcement learning"
        else:
            text += f", held-out accuracy {last:.3f} after step {step}"
    return text
