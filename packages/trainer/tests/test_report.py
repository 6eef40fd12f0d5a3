import math
import re
from xml.etree import ElementTree

import pytest
from tidemill_trainer.chart import line_chart
from tidemill_trainer.report import write_report
from tidemill_trainer.run_dir import RunDir


def _lines(svg):
    root = ElementTree.fromstring(svg)
    return [
        [tuple(map(float, point.split(","))) for point in line.get("points").split()] for line in root.iter("polyline")
    ]


def test_a_chart_draws_every_point_inside_and_keeps_the_order_of_values():
    values = [(0, 3.0), (5, -1.0), (10, 7.5)]
    (line,) = _lines(line_chart("t", {"a": values}))
    assert [x for x, _ in line] == sorted(x for x, _ in line)
    assert line[1][1] > line[0][1] > line[2][1]  # SVG's y axis points down
    assert all(0 <= x <= 460 and 0 <= y <= 250 for x, y in line)


def test_a_logarithmic_axis_spaces_powers_of_ten_evenly():
    (line,) = _lines(line_chart("t", {"a": [(0, 1e-7), (1, 1e-5), (2, 1e-3), (3, 0.0)]}, log_y=True))
    assert len(line) == 3  # zero cannot be drawn
    assert line[0][1] - line[1][1] == pytest.approx(line[1][1] - line[2][1], abs=0.2)


def _texts(svg, kind):
    return [text for text in ElementTree.fromstring(svg).iter() if text.get("class") == kind]


def test_the_legend_is_above_the_lines_and_names_only_what_is_drawn():
    names = ("gen", "reward", "old_log_prob", "update_actor", "update_weights", "testing", "save_checkpoint")
    svg = line_chart("Seconds per phase", {name: [(1, 0.0), (2, 5.0)] for name in names} | {"empty": []})
    lines = [line for line in ElementTree.fromstring(svg).iter("text") if line.find("tspan") is not None]
    assert [part.text for line in lines for part in line] == ["Seconds per phase", *names]
    assert max(float(line.get("y")) for line in lines) < min(y for line in _lines(svg) for _, y in line)
    assert all(58 + sum(7 * len(part.text) + 10 for part in line) <= 460 for line in lines)
    assert _texts(line_chart("t", {"a": [(1, 1.0)], "b": [(1, math.nan)]}), "legend") == []


def test_ticks_are_plain_numbers_and_steps_are_whole():
    svg = line_chart("t", {"a": [(1, 0.0), (2, 15000.0)]})
    assert [text.text for text in _texts(svg, "tick-x")] == ["1", "2"]
    assert [text.text for text in _texts(svg, "tick-y")] == ["0", "5000", "10000", "15000"]


@pytest.mark.parametrize("points", [[], [(1, 2.0)], [(1, 2.0), (2, 2.0)], [(1, math.nan), (2, math.inf)], [(0, 0.0)]])
def test_odd_data_still_gives_a_picture(points):
    assert ElementTree.fromstring(line_chart("a < b", {"x": points})).tag == "svg"


def test_the_report_is_one_file_and_shows_text_of_the_model_as_text(tmp_path):
    run = RunDir(tmp_path)
    run.config.write_text('[model]\npath = "<b>"\n')
    run.append_metrics({"step": 0, "phase": "rl", "val/accuracy": 0.25})
    run.append_metrics({"step": 1, "phase": "rl", "critic/score/mean": 0.5, "val/accuracy": 0.75})
    run.append_metrics({"step": 2, "phase": "rl", "critic/score/mean": 0.5, "actor/grad_norm": math.inf})
    row = {
        "step": 1,
        "prompt": "<script>alert(1)</script>",
        "response": "2",
        "ground_truth": "2",
        "score": 1.0,
        "acc": 1.0,
    }
    run.append_rollouts([row])
    write_report(run)
    page = run.report.read_text()
    assert "<script" not in page
    assert "&lt;script&gt;alert(1)" in page
    assert "2 steps, held-out accuracy 0.250 before and 0.750 after reinforcement learning" in page
    assert not re.search(r"(src|href|url)\s*[=(]", page)
    assert page.count("<svg") == 7


def test_the_report_has_failed_rewards_if_there_were_any_and_what_a_demo_is_about(tmp_path):
    run = RunDir(tmp_path)
    run.config.write_text("")
    run.append_metrics({"step": 1, "phase": "rl", "reward/num_errors": 0.0})
    write_report(run)
    assert "Failed rewards" not in run.report.read_text()
    run.append_metrics({"step": 2, "phase": "rl", "reward/num_errors": 3.0})
    run.about.parent.mkdir()
    run.about.write_text("from right <to> left")
    write_report(run)
    assert "Failed rewards" in run.report.read_text()
    assert "from right &lt;to&gt; left" in run.report.read_text()


def test_a_run_that_never_made_a_step_has_a_report_too(tmp_path):
    run = RunDir(tmp_path)
    run.config.write_text("")
    write_report(run)
    assert "0 steps" in run.report.read_text()
