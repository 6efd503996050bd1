"""Small plots as inline SVG: lines with bands, grouped bars, stacked bars. Colours come from the page's style sheet.

Knows numbers and labels. Must not know what they mean.

Class ``c0``, ``c1``, .. of a shape is its series; text takes the page's own colour, so light and dark both work.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 420, 250
LEFT, RIGHT, TOP, BOTTOM = 56, 10, 14, 40
SERIES = 6
"""Colours that the style sheet has; more series begin again with the first."""


@dataclass(frozen=True)
class Line:
    """One series of points, with the limits of a band; limits that are not a number are left out of it."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] | None = None
    high: Sequence[float] | None = None


@dataclass(frozen=True)
class _Scale:
    """From values to positions on the page."""

    least: float
    most: float
    begin: float
    end: float

    def __call__(self, value: float) -> float:
        part = (value - self.least) / (self.most - self.least or 1)
        return round(self.begin + part * (self.end - self.begin), 1)


def line_plot(lines: Sequence[Line], x_title: str, y_title: str, x_range: tuple[float, float], label: str) -> str:
    """Points joined by lines over ``x_range``, from 0 to 1 upwards."""
    x = _Scale(*x_range, LEFT, WIDTH - RIGHT)
    y = _Scale(0, 1, HEIGHT - BOTTOM, TOP)
    span = x_range[1] - x_range[0]
    step = 0.2 if span <= 1 else math.ceil(span / 8)
    ticks = [x_range[0] + i * step for i in range(int(span / step + 1e-9) + 1)]
    parts = [_axes(x_title, y_title, [(x(v), _number(v)) for v in ticks], _fractions(y))]
    for i, line in enumerate(lines):
        series = f"c{i % SERIES}"
        if line.low is not None and line.high is not None:
            edges = [
                [f"{x(a)},{y(b)}" for a, b in zip(line.x, limits, strict=True) if not math.isnan(b)]
                for limits in (line.high, line.low)
            ]
            if edges[0]:
                parts.append(f'<polygon class="band {series}" points="{" ".join(edges[0] + edges[1][::-1])}"/>')
        points = [(x(a), y(b)) for a, b in zip(line.x, line.y, strict=True)]
        parts.append(f'<polyline class="line {series}" points="{" ".join(f"{a},{b}" for a, b in points)}"/>')
        for (a, b), at, value in zip(points, line.x, line.y, strict=True):
            tip = f"{line.name}: {value:.3g} at {_number(at)}"
            parts.append(f'<circle class="{series}" cx="{a}" cy="{b}" r="3"><title>{escape(tip)}</title></circle>')
    return _svg("".join(parts), label)


def diagonal_plot(lines: Sequence[Line], x_title: str, y_title: str, label: str) -> str:
    """As :func:`line_plot` from 0 to 1 both ways, with the diagonal on which both are equal."""
    plot = line_plot(lines, x_title, y_title, (0, 1), label)
    diagonal = f'<line class="guide" x1="{LEFT}" y1="{HEIGHT - BOTTOM}" x2="{WIDTH - RIGHT}" y2="{TOP}"/>'
    return plot.replace('<g class="axes">', diagonal + '<g class="axes">', 1)


def bar_plot(groups: Sequence[tuple[str, Sequence[float]]], x_title: str, y_title: str, label: str) -> str:
    """Bars side by side: each group is a name and the height, a fraction, at ``0, 1, ..``."""
    count = max(len(heights) for _, heights in groups)
    most = max(max(heights, default=0.0) for _, heights in groups) or 1.0
    y = _Scale(0, most, HEIGHT - BOTTOM, TOP)
    step = (WIDTH - LEFT - RIGHT) / count
    width = 0.8 * step / len(groups)
    every = 1 if count <= 16 else 2 if count <= 32 else 8
    ticks = [(round(LEFT + (i + 0.5) * step, 1), str(i)) for i in range(0, count, every)]
    parts = [_axes(x_title, y_title, ticks, [(y(most * i / 4), f"{most * i / 4:.0%}") for i in range(5)])]
    for i, (name, heights) in enumerate(groups):
        for j, height in enumerate(heights):
            left, top = LEFT + (j + 0.1) * step + i * width, y(height)
            tip = escape(f"{name}: {height:.1%} at {j}")
            parts.append(
                f'<rect class="c{i % SERIES}" x="{left:.1f}" y="{top}" width="{max(width - 0.5, 0.5):.1f}" '
                f'height="{HEIGHT - BOTTOM - top:.1f}"><title>{tip}</title></rect>'
            )
    return _svg("".join(parts), label)


def stacked_bars(rows: Sequence[tuple[str, Sequence[tuple[str, float]]]], unit: str, label: str) -> str:
    """A horizontal bar for each row, made of named parts in the order given; parts have the colours ``p0``, ``p1``."""
    most = max(sum(value for _, value in parts) for _, parts in rows) or 1.0
    x = _Scale(0, most, 8, WIDTH - 8)
    height = 22 + 46 * len(rows) + 44
    drawn = []
    for i, (name, parts) in enumerate(rows):
        top, at = 22 + 46 * i, 0.0
        total = sum(value for _, value in parts)
        drawn.append(f'<text x="8" y="{top - 5}">{escape(_shortened(name))}: {total:.2f} {unit}</text>')
        for j, (part, value) in enumerate(parts):
            if value > 0:
                tip = escape(f"{name}, {part}: {value:.2f} {unit} ({value / (total or 1):.0%})")
                drawn.append(
                    f'<rect class="p{j}" x="{x(at)}" y="{top}" width="{max(x(at + value) - x(at), 0.5):.1f}" '
                    f'height="20"><title>{tip}</title></rect>'
                )
            at += value
    at, top = 8.0, height - 42  # the key, which takes a second line where the first is full
    for j, (part, _) in enumerate(rows[0][1]):
        if at + 20 + 7 * len(part) > WIDTH:
            at, top = 8.0, height - 20
        drawn.append(f'<rect class="p{j}" x="{at}" y="{top}" width="10" height="10"/>')
        drawn.append(f'<text x="{at + 14}" y="{top + 9}">{escape(part)}</text>')
        at += 26 + 7 * len(part)
    return _svg("".join(drawn), label, height)


def _axes(
    x_title: str, y_title: str, x_ticks: Sequence[tuple[float, str]], y_ticks: Sequence[tuple[float, str]]
) -> str:
    bottom = HEIGHT - BOTTOM
    parts = [f'<line x1="{LEFT}" y1="{bottom}" x2="{WIDTH - RIGHT}" y2="{bottom}"/>']
    for at, text in y_ticks:
        parts.append(f'<line class="grid" x1="{LEFT}" y1="{at}" x2="{WIDTH - RIGHT}" y2="{at}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{at + 4}" text-anchor="end">{text}</text>')
    parts += [f'<text x="{at}" y="{bottom + 16}" text-anchor="middle">{text}</text>' for at, text in x_ticks]
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(f'<text x="{middle}" y="{HEIGHT - 5}" text-anchor="middle">{escape(x_title)}</text>')
    turned = f'transform="translate(11 {(TOP + bottom) / 2}) rotate(-90)"'
    parts.append(f'<text {turned} text-anchor="middle">{escape(y_title)}</text>')
    return f'<g class="axes">{"".join(parts)}</g>'


def _fractions(y: _Scale) -> list[tuple[float, str]]:
    return [(y(i / 4), f"{i / 4:.0%}") for i in range(5)]


def _number(value: float) -> str:
    return f"{value:.3g}"


def _shortened(text: str) -> str:
    return text if len(text) <= 40 else text[:39] + "…"


def _svg(inside: str, label: str, height: float = HEIGHT) -> str:
    return f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(label)}">{inside}</svg>'
