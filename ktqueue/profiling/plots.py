"""Plots as SVG: curves, stacked areas, bars and heat maps with axes. Knows nothing of profiles.

Sizes are in units of the plot's viewBox, so a plot scales with the page. Colours are classes and variables of the page.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise

WIDTH, HEIGHT = 960, 260
LEFT, RIGHT, TOP, BOTTOM = 62, 12, 10, 34  # margins
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#B8A800", "#7A7A7A")
"""Okabe's and Ito's, which people with any colour vision can tell apart."""


@dataclass(frozen=True, slots=True)
class Curve:
    """y over x, in one colour. Points must be in the order of x; NaN as y interrupts the line."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    colour: str


@dataclass(frozen=True, slots=True)
class Axes:
    """The ranges and names of both axes; y begins at 0."""

    x_name: str
    y_name: str
    x_range: tuple[float, float]
    y_most: float

    def x(self, value: float) -> float:
        """The place of a value."""
        low, high = self.x_range
        return round(LEFT + (value - low) / ((high - low) or 1.0) * (WIDTH - LEFT - RIGHT), 1)

    def y(self, value: float) -> float:
        """The place of a value; values beyond the axis are at its end."""
        share = min(1.0, value / (self.y_most or 1.0))
        return round(HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM), 1)

    def frame(self) -> str:
        """Lines, ticks and names."""
        parts = []
        for tick in ticks(0.0, self.y_most):
            y = self.y(tick)
            parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y}" y2="{y}"/>')
            parts.append(f'<text x="{LEFT - 6}" y="{y + 4}" text-anchor="end">{number(tick)}</text>')
        low = HEIGHT - BOTTOM + 16
        parts += [
            f'<text x="{self.x(tick)}" y="{low}" text-anchor="middle">{number(tick)}</text>'
            for tick in ticks(*self.x_range, about=8)
        ]
        middle = (TOP + HEIGHT - BOTTOM) / 2
        parts.append(f'<text x="{WIDTH - RIGHT}" y="{HEIGHT - 4}" text-anchor="end">{escape(self.x_name)}</text>')
        parts.append(
            f'<text x="12" y="{middle}" text-anchor="middle" transform="rotate(-90 12 {middle})">'
            f"{escape(self.y_name)}</text>"
        )
        return "".join(parts)


def curves(title: str, x_name: str, y_name: str, shown: Sequence[Curve]) -> str:
    """Lines over a common x."""
    x_range = _range([value for curve in shown for value in curve.x])
    most = max((value for curve in shown for value in curve.y if not math.isnan(value)), default=1.0)
    axes = Axes(x_name, y_name, x_range, most)
    lines = [
        f'<path class="line" stroke="{curve.colour}" d="{_line(axes, curve)}"><title>{escape(curve.name)}</title>'
        "</path>"
        for curve in shown
    ]
    return _figure(title, axes.frame() + "".join(lines), [(curve.name, curve.colour) for curve in shown])


def stacked(title: str, x_name: str, y_name: str, shown: Sequence[Curve]) -> str:
    """Areas on top of each other. All curves have the same x."""
    if not shown:
        return ""
    x = shown[0].x
    tops = [[0.0] * len(x)]
    for curve in shown:
        tops.append([below + y for below, y in zip(tops[-1], curve.y, strict=True)])
    axes = Axes(x_name, y_name, _range(x), max(tops[-1], default=1.0))
    areas = []
    for curve, (below, above) in zip(shown, pairwise(tops), strict=True):
        edge = [f"{axes.x(a)},{axes.y(b)}" for a, b in zip(x, above, strict=True)]
        edge += [f"{axes.x(a)},{axes.y(b)}" for a, b in zip(reversed(x), reversed(below), strict=True)]
        areas.append(
            f'<polygon fill="{curve.colour}" points="{" ".join(edge)}"><title>{escape(curve.name)}</title></polygon>'
        )
    return _figure(title, axes.frame() + "".join(areas), [(curve.name, curve.colour) for curve in shown])


def bars(title: str, x_name: str, y_name: str, edges: Sequence[float], heights: Sequence[float]) -> str:
    """A histogram: `heights[i]` between `edges[i]` and `edges[i + 1]`."""
    axes = Axes(x_name, y_name, (edges[0], edges[-1]), max(heights, default=1.0))
    parts = []
    for (low, high), height in zip(pairwise(edges), heights, strict=True):
        left, top = axes.x(low), axes.y(height)
        width, tall = max(0.5, axes.x(high) - left - 1), HEIGHT - BOTTOM - top
        label = f"{number(low)} to {number(high)} {x_name}: {number(height)}"
        parts.append(
            f'<rect x="{left}" y="{top}" width="{width:.1f}" height="{tall:.1f}" fill="{COLOURS[0]}">'
            f"<title>{escape(label)}</title></rect>"
        )
    return _figure(title, axes.frame() + "".join(parts), [])


def heat(title: str, x_name: str, y_name: str, rows: Sequence[Sequence[float]]) -> str:
    """A map of `rows` [y][x]: the largest value is the darkest cell."""
    columns = max(map(len, rows), default=0)
    most = max((value for row in rows for value in row), default=0.0) or 1.0
    if not columns:
        return ""
    wide, tall = (WIDTH - LEFT - RIGHT) / columns, max(4.0, min(18.0, 420 / len(rows)))
    height = TOP + tall * len(rows) + BOTTOM
    parts = []
    for y, row in enumerate(rows):
        for x, value in enumerate(row):
            place = f'x="{LEFT + x * wide:.1f}" y="{TOP + y * tall:.1f}" width="{wide:.2f}" height="{tall:.2f}"'
            label = f"{y_name} {y}, {x_name} {x}: {number(value)}"
            parts.append(
                f'<rect class="cell" {place} fill-opacity="{math.sqrt(value / most):.3f}"><title>{label}</title></rect>'
            )
    parts += [
        f'<text x="{LEFT - 6}" y="{TOP + (y + 0.5) * tall + 4:.1f}" text-anchor="end">{y}</text>'
        for y in range(0, len(rows), max(1, len(rows) // 8))
    ]
    for x in range(0, columns, max(1, columns // 8)):
        place = f'x="{LEFT + (x + 0.5) * wide:.1f}" y="{height - BOTTOM + 16:.1f}"'
        parts.append(f'<text {place} text-anchor="middle">{x}</text>')
    parts.append(f'<text x="{WIDTH - RIGHT}" y="{height - 4:.1f}" text-anchor="end">{escape(x_name)}</text>')
    middle = (TOP + height - BOTTOM) / 2
    parts.append(
        f'<text x="12" y="{middle:.1f}" text-anchor="middle" transform="rotate(-90 12 {middle:.1f})">{y_name}</text>'
    )
    return _figure(title, "".join(parts), [], height=height)


def ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Round values from `low` to `high`, about so many."""
    step = 10.0 ** math.floor(math.log10(max(high - low, 1e-12) / about))
    step *= next(factor for factor in (1, 2, 5, 10) if (high - low) / (step * factor) <= about)
    first = math.ceil(low / step - 1e-9)
    return [place * step for place in range(first, math.floor(high / step + 1e-9) + 1)]


def number(value: float) -> str:
    """A value in few digits."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _line(axes: Axes, curve: Curve) -> str:
    """The path of a curve. A point between two gaps is a line of no length, which has round ends."""
    words = []
    drawn = False
    for x, y in zip(curve.x, curve.y, strict=True):
        if not math.isnan(y):
            place = f"{axes.x(x)} {axes.y(y)}"
            words.append(f"L{place}" if drawn else f"M{place}L{place}")
        drawn = not math.isnan(y)
    return "".join(words)


def _range(values: Sequence[float]) -> tuple[float, float]:
    return (min(values), max(values)) if values else (0.0, 1.0)


def _figure(title: str, inside: str, legend: Sequence[tuple[str, str]], *, height: float = HEIGHT) -> str:
    keys = "".join(
        f'<span class="key"><i style="background:{colour}"></i>{escape(name)}</span>' for name, colour in legend
    )
    return (
        f"<figure><figcaption><b>{escape(title)}</b>{keys}</figcaption>"
        f'<svg viewBox="0 0 {WIDTH} {height:.0f}" role="img" aria-label="{escape(title)}">{inside}</svg></figure>\n'
    )
