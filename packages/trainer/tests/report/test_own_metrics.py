from xml.etree import ElementTree

import pytest
from tidemill_rollout import Outcome, Problem
from tidemill_trainer.metrics import episode_metrics
from tidemill_trainer.report import write_report
from tidemill_trainer.report.charts import own_charts
from tidemill_trainer.rollout.episode_task import Episodes, EpisodeSummary, EpisodeTask


def _step(step, outcomes):
    """Return the line of a step in `metrics.jsonl`.

    Args:
        outcomes: metrics of episodes, by data source.
    """
    summaries = [
        EpisodeSummary(
            task=EpisodeTask(number=number, problem=Problem(prompt="1+1=", id=str(number), data_source=source)),
            outcome=Outcome(reward=0.5, metrics=metrics),
            counts={"num_turns": 2.0},
            seconds=1.0,
        )
        for number, (source, metrics) in enumerate(outcomes.items())
    ]
    episodes = Episodes(rows=None, summaries=summaries, num_generated=0, num_lost=0, num_restarts=0)
    return {"step": step, "phase": "rl", **episode_metrics(episodes, 1)}


def _drawn(svg, kind):
    """Return texts of this class, and the tooltips of the steps."""
    root = ElementTree.fromstring(svg)
    texts = [element.text for element in root.iter() if element.get("class") == kind]
    return texts, [element.text for element in root.iter("title")]


def test_each_metric_has_a_chart_with_a_line_per_data_source():
    outcomes = {"a": {"format": 0.25, "acc": 1.0}, "a/b": {"tool/calls": 3.0, "format": 1.0}, "c": {}}
    metrics = [_step(1, outcomes), _step(2, outcomes), {"step": 2, "val/accuracy": 0.5}]
    format_chart, tool_chart = own_charts(metrics, {1.0: "#step-1"})
    assert _drawn(format_chart, "title") == (["format"], ["step 1: a 0.25, a/b 1"])
    assert _drawn(format_chart, "legend")[0] == ["a", "a/b"]
    assert _drawn(tool_chart, "title") == (["tool/calls"], ["step 1: a/b 3"])
    assert ElementTree.fromstring(tool_chart).find(".//polyline").get("points").count(",") == 2


@pytest.mark.parametrize(("number", "shown"), [(8, "step 1: "), (9, "step 1: mean 4")])
def test_chart_of_many_data_sources_has_their_mean(number, shown):
    metrics = [_step(1, {f"source {each}": {"format": float(each)} for each in range(number)})]
    (chart,) = own_charts(metrics, {1.0: "#step-1"})
    (title,), (tooltip,) = _drawn(chart, "title")
    assert title == ("format" if number == 8 else "format (mean of 9 data sources)")
    assert tooltip.startswith(shown)
    assert len(_drawn(chart, "legend")[0]) == (8 if number == 8 else 0)


def test_page_has_a_heading_for_own_metrics_if_there_are_any(run):
    run.append_metrics(_step(1, {"sums": {"acc": 1.0}}))
    write_report(run)
    heading = "<h2>Metrics of episodes and reward functions</h2>"
    assert heading not in run.report.read_text()
    run.append_metrics(_step(2, {"sums": {"acc": 1.0, "<format>": 0.5}}))
    write_report(run)
    page = run.report.read_text()
    assert page.split(heading, 1)[1].split("<h2>", 1)[0].count("<svg") == 1
    assert "&lt;format&gt;" in page
