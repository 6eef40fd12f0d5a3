import math
from xml.etree import ElementTree

import pytest
from tidemill_trainer.report.chart import line_chart


def _lines(svg):
    root = ElementTree.fromstring(svg)
    return [
        [tuple(map(float, point.split(","))) for point in line.get("points").split()] for line in root.iter("polyline")
    ]


def test_every_point_is_inside_the_chart_and_keeps_its_order():
    values = [(0, 3.0), (5, -1.0), (10, 7.5)]
    (line,) = _lines(line_chart("t", {"a": values}))
    assert [x for x, _ in line] == sorted(x for x, _ in line)
    assert line[1][1] > line[0][1] > line[2][1]  # SVG's y axis points down
    assert all(0 <= x <= 460 and 0 <= y <= 250 for x, y in line)


def test_logarithmic_axis_spaces_powers_of_ten_evenly():
    (line,) = _lines(line_chart("t", {"a": [(0, 1e-7), (1, 1e-5), (2, 1e-3), (3, 0.0)]}, log_y=True))
    assert len(line) == 3  # zero cannot be drawn
    assert line[0][1] - line[1][1] == pytest.approx(line[1][1] - line[2][1], abs=0.2)


def _texts(svg, kind):
    return [text for text in ElementTree.fromstring(svg).iter() if text.get("class") == kind]


def test_legend_is_above_the_lines_and_lists_only_drawn_series():
    names = ("gen", "reward", "old_log_prob", "update_actor", "update_weights", "testing", "save_checkpoint")
    svg = line_chart("Seconds per phase", {name: [(1, 0.0), (2, 5.0)] for name in names} | {"empty": []})
    lines = [line for line in ElementTree.fromstring(svg).iter("text") if line.find("tspan") is not None]
    assert [part.text for line in lines for part in line] == ["Seconds per phase", *names]
    assert max(float(line.get("y")) for line in lines) < min(y for line in _lines(svg) for _, y in line)
    assert all(58 + sum(7 * len(part.text) + 10 for part in line) <= 460 for line in lines)
    assert _texts(line_chart("t", {"a": [(1, 1.0)], "b": [(1, math.nan)]}), "legend") == []


def test_ticks_are_plain_numbers_and_steps_are_integers():
    svg = line_chart("t", {"a": [(1, 0.0), (2, 15000.0)]})
    assert [text.text for text in _texts(svg, "tick-x")] == ["1", "2"]
    assert [text.text for text in _texts(svg, "tick-y")] == ["0", "5000", "10000", "15000"]


@pytest.mark.parametrize(
    "points",
    [
        [],
        [(1, 2.0)],
        [(1, 2.0), (2, 2.0)],
        [(1, math.nan), (2, math.inf)],
        [(0, 0.0)],
        [(1, 1.9499999999999993), (2, 1.9499999999999995)],  # means of equal numbers
    ],
)
def test_empty_constant_and_nonfinite_data_give_a_chart(points):
    assert ElementTree.fromstring(line_chart("a < b", {"x": points})).tag == "svg"
