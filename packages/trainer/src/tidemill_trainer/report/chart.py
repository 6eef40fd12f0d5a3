"""Line charts as SVG text, without scripts, fonts or other files."""

import math
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from itertools import pairwise

_WIDTH, _HEIGHT = 460, 250
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 14, 34, 34
_TITLE_CHAR, _LEGEND_CHAR, _LEGEND_GAP, _LEGEND_LINE = 9, 7, 10, 14  # pixels; upper bounds for a character
_COLORS = ("#0b6e99", "#d9730d", "#448361", "#9065b0", "#c14c8a", "#787774", "#cb912f", "#d44c47")

Points = Sequence[tuple[float, float]]


def line_chart(
    title: str, series: Mapping[str, Points], *, log_y: bool = False, links: Mapping[float, str] | None = None
) -> str:
    """Return an SVG chart with one line per series, and a legend next to the title if there are several.

    Args:
        title: title of the chart.
        series: (x, y) points by name. Points that are not finite (or not positive with `log_y`) are omitted, as are
            series without any other points.
        log_y: use a logarithmic y axis.
        links: addresses by x. A click goes to the address of the nearest x.
    """
    drawable = {name: [p for p in points if _drawable(p, log_y)] for name, points in series.items()}
    clean = {name: points for name, points in drawable.items() if points}
    points = [point for line in clean.values() for point in line]
    heading = _heading(title, list(clean) if len(clean) > 1 else [])
    head = f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escape(title)}">{"".join(heading)}'
    if not points:
        return head + f'<text x="{_WIDTH / 2}" y="{_HEIGHT / 2}" class="empty">no data</text></svg>'
    top = _TOP + _LEGEND_LINE * (len(heading) - 1)
    x_axis = _Axis.around([x for x, _ in points], _LEFT, _WIDTH - _RIGHT, log=False, whole=_are_whole(points))
    y_axis = _Axis.around([y for _, y in points], _HEIGHT - _BOTTOM, top, log=log_y)
    parts = [head, *_grid(x_axis, y_axis)]
    for number, line in enumerate(clean.values()):
        color = _COLORS[number % len(_COLORS)]
        path = " ".join(f"{x_axis.at(x):.1f},{y_axis.at(y):.1f}" for x, y in line)
        parts.append(f'<polyline points="{path}" style="stroke:{color}"/>')
        if len(line) <= 40:
            dots = (f'<circle cx="{x_axis.at(x):.1f}" cy="{y_axis.at(y):.1f}" r="2" fill="{color}"/>' for x, y in line)
            parts.extend(dots)
    low, high = min(x for x, _ in points), max(x for x, _ in points)
    near = {x: address for x, address in sorted((links or {}).items()) if low <= x <= high}
    return "".join([*parts, *_bands(near, x_axis, clean)]) + "</svg>"


def _heading(title: str, names: Sequence[str]) -> list[str]:
    """Return one text element per line: the title, then the names in the colors of their series."""
    lines, x = [f'<tspan class="title">{escape(title)}</tspan>'], _LEFT + _TITLE_CHAR * len(title)
    for number, name in enumerate(names):
        width = _LEGEND_CHAR * len(name)
        is_first = x + _LEGEND_GAP + width > _WIDTH - _RIGHT
        if is_first:
            lines.append("")
            x = _LEFT - _LEGEND_GAP
        color, gap = _COLORS[number % len(_COLORS)], "" if is_first else f' dx="{_LEGEND_GAP}"'
        lines[-1] += f'<tspan class="legend" fill="{color}"{gap}>{escape(name)}</tspan>'
        x += _LEGEND_GAP + width
    return [f'<text x="{_LEFT}" y="{18 + _LEGEND_LINE * n}">{line}</text>' for n, line in enumerate(lines)]


def _are_whole(points: Points) -> bool:
    return all(float(x).is_integer() for x, _ in points)


def _drawable(point: tuple[float, float], log_y: bool) -> bool:
    return math.isfinite(point[0]) and math.isfinite(point[1]) and not (log_y and point[1] <= 0)


class _Axis:
    """A mapping of numbers from `low` to `high` to pixels from `start` to `end`."""

    def __init__(self, low: float, high: float, start: float, end: float, ticks: list[float], log: bool) -> None:
        self._low, self._high, self._start, self._end, self._log = low, high, start, end, log
        self.ticks = ticks

    @classmethod
    def around(cls, numbers: list[float], start: float, end: float, *, log: bool, whole: bool = False) -> "_Axis":
        if log:
            low, high = (bound(math.log10(edge(numbers))) for bound, edge in ((math.floor, min), (math.ceil, max)))
            high = max(high, low + 1)
            ticks = [10.0**power for power in range(low, high + 1, max(1, (high - low) // 5))]
            return cls(low, high, start, end, ticks, True)
        low, high = min(numbers), max(numbers)
        is_flat = high - low <= 1e-9 * max(abs(low), abs(high))  # equal, or different by rounding alone
        step = _round_step(max(abs(high), 1.0) if is_flat else (high - low) / 4)
        step = max(step, 1.0) if whole else step
        first, last = math.floor(low / step), math.ceil(high / step)
        last = max(last, first + 1)
        return cls(first * step, last * step, start, end, [n * step for n in range(first, last + 1)], False)

    def at(self, number: float) -> float:
        value = math.log10(number) if self._log else number
        return self._start + (value - self._low) / (self._high - self._low) * (self._end - self._start)


def _round_step(raw: float) -> float:
    """Return the next larger number that is 1, 2 or 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(raw))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw * 0.999)


def _bands(links: Mapping[float, str], x_axis: _Axis, series: Mapping[str, Points]) -> Iterator[str]:
    """Yield an invisible rectangle for each link, with the values at its x as a tooltip, and a mark on the x axis."""
    if not links:
        return
    places = [x_axis.at(x) for x in links]
    middles = [(left + right) / 2 for left, right in pairwise(places)]
    values = {name: dict(points) for name, points in series.items()}
    bottom = _HEIGHT - _BOTTOM
    edges = pairwise([_LEFT, *middles, _WIDTH - _RIGHT])
    for (x, address), place, (left, right) in zip(links.items(), places, edges, strict=True):
        numbers = ", ".join(f"{name} {line[x]:.4g}" for name, line in values.items() if x in line)
        yield (
            f'<a href="{escape(address)}"><title>{escape(f"step {x:g}: {numbers}")}</title>'
            f'<path class="mark" d="M{place:.1f} {bottom - 4}v8"/>'
            f'<rect class="band" x="{left:.1f}" y="{_TOP}" width="{right - left:.1f}" height="{bottom - _TOP}"/></a>'
        )


def _grid(x_axis: _Axis, y_axis: _Axis) -> list[str]:
    parts = []
    for tick in y_axis.ticks:
        y = y_axis.at(tick)
        parts.append(f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}" class="grid"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" class="tick-y">{_number(tick)}</text>')
    parts.extend(
        f'<text x="{x_axis.at(tick):.1f}" y="{_HEIGHT - _BOTTOM + 18}" class="tick-x">{_number(tick)}</text>'
        for tick in x_axis.ticks
    )
    return parts


def _number(tick: float) -> str:
    return f"{tick:.10g}" if abs(tick) < 1e7 else f"{tick:.4g}"
