"""Line plots and stacked areas as inline SVG, coloured by the page's style: c0, c1, … are lines, a0, a1, … areas."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from typing import TypeGuard

WIDTH, HEIGHT = 400.0, 190.0
LEFT, RIGHT, TOP, BOTTOM = 44.0, 8.0, 8.0, 20.0
COLOURS = 8
MOST_POINTS = 400
"""More are averaged, several to one."""
SMOOTH_FROM, SMOOTH_SHARE = 60, 1 / 30
"""With so many points a line is thin, and a thick one follows its mean over this share of them."""

Value = float | None


@dataclass(frozen=True)
class Line:
    """One line; where `ys` is None it has a gap.

    Attributes:
        colour: which of the page's.
        dash: 0: a whole line.
    """

    name: str
    xs: Sequence[float]
    ys: Sequence[Value]
    colour: int = 0
    dash: int = 0


@dataclass(frozen=True)
class Plot:
    """A figure.

    Attributes:
        note: what to make of it.
        stacked: lines are shares of a whole, one upon the other.
        percent: values are shares, written as such.
    """

    title: str
    lines: Sequence[Line]
    note: str = ""
    stacked: bool = False
    percent: bool = False
    x_name: str = "step"


@dataclass(frozen=True)
class Scale:
    """Values to places within the picture."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        return self.start + (value - self.low) * (self.end - self.start) / (self.high - self.low)


def svg(plot: Plot) -> str:
    """The picture. Without any number in it, it says so."""
    lines = [thinned(line) for line in plot.lines]
    if plot.stacked:
        lines = stacked(lines)
    ys = [y for line in lines for y in line.ys if _is_number(y)]
    xs = [x for line in lines for x in line.xs]
    if not ys:
        return '<p class="dim">no numbers yet</p>'
    low, high = (min(0.0, min(ys)) if plot.stacked else min(ys)), max(ys)
    ticks = nice_ticks(low, high)
    y = Scale(min(low, ticks[0]), max(high, ticks[-1]), HEIGHT - BOTTOM, TOP)
    x = Scale(min(xs), max(xs) if max(xs) > min(xs) else min(xs) + 1.0, LEFT, WIDTH - RIGHT)
    parts = [f'<svg viewBox="0 0 {WIDTH:g} {HEIGHT:g}" role="img" aria-label="{escape(plot.title, quote=True)}">']
    parts += _axes(ticks, nice_ticks(x.low, x.high, 4), x, y, percent=plot.percent)
    parts += list(_areas(lines, x, y)) if plot.stacked else [part for line in lines for part in _drawn(line, x, y)]
    parts.append(f'<line class="cursor" y1="{TOP:g}" y2="{HEIGHT - BOTTOM:g}" x1="-9" x2="-9"/></svg>')
    return "".join(parts)


def _axes(y_ticks: Sequence[float], x_ticks: Sequence[float], x: Scale, y: Scale, *, percent: bool) -> Iterator[str]:
    for tick in y_ticks:
        yield f'<line class="grid" x1="{LEFT:g}" x2="{WIDTH - RIGHT:g}" y1="{y(tick):.1f}" y2="{y(tick):.1f}"/>'
        yield f'<text x="{LEFT - 4:g}" y="{y(tick) + 3.5:.1f}" text-anchor="end">{short(tick, percent=percent)}</text>'
    for tick in x_ticks:
        if x.low <= tick <= x.high:
            anchor = "end" if x(tick) > WIDTH - 2 * RIGHT else "middle"  # or it would be cut off
            yield f'<text x="{x(tick):.1f}" y="{HEIGHT - 6:g}" text-anchor="{anchor}">{short(tick)}</text>'


def _drawn(line: Line, x: Scale, y: Scale) -> Iterator[str]:
    many = len(line.ys) >= SMOOTH_FROM
    style = f"c{line.colour % COLOURS} d{line.dash % 3}"
    for path in _paths(line.xs, line.ys, x, y):
        yield f'<polyline class="{style}{" thin" if many else ""}" points="{path}"/>'
    if many:
        for path in _paths(line.xs, smoothed(line.ys), x, y):
            yield f'<polyline class="{style}" points="{path}"/>'


def _paths(xs: Sequence[float], ys: Sequence[Value], x: Scale, y: Scale) -> Iterator[str]:
    """The pieces between gaps; a single point is a short dash."""
    piece: list[str] = []
    for at, value in [*zip(xs, ys, strict=True), (0.0, None)]:
        if _is_number(value):
            piece.append(f"{x(at):.1f},{y(value):.1f}")
        elif piece:
            if len(piece) == 1:
                left, top = piece[0].split(",")
                piece.append(f"{float(left) + 3:.1f},{top}")
            yield " ".join(piece)
            piece = []


def _areas(lines: Sequence[Line], x: Scale, y: Scale) -> Iterator[str]:
    """Between each line and the one below."""
    below: Sequence[Value] = [0.0] * len(lines[0].xs) if lines else []
    for line in lines:
        top = [f"{x(at):.1f},{y(value or 0.0):.1f}" for at, value in zip(line.xs, line.ys, strict=True)]
        floor = [f"{x(at):.1f},{y(value or 0.0):.1f}" for at, value in zip(line.xs, below, strict=True)]
        yield f'<polygon class="a{line.colour % COLOURS}" points="{" ".join([*top, *reversed(floor)])}"/>'
        below = line.ys


def stacked(lines: Sequence[Line]) -> list[Line]:
    """Each line upon those before; they share their places."""
    total = [0.0] * len(lines[0].xs) if lines else []
    found = []
    for line in lines:
        total = [before + (value if _is_number(value) else 0.0) for before, value in zip(total, line.ys, strict=True)]
        found.append(Line(line.name, line.xs, total, line.colour))
    return found


def thinned(line: Line) -> Line:
    """At most `MOST_POINTS`, each the mean of its neighbours."""
    each = -(-len(line.xs) // MOST_POINTS)
    if each <= 1:
        return line
    starts = range(0, len(line.xs), each)
    return Line(
        line.name,
        [sum(line.xs[at : at + each]) / len(line.xs[at : at + each]) for at in starts],
        [_mean(line.ys[at : at + each]) for at in starts],
        line.colour,
        line.dash,
    )


def smoothed(ys: Sequence[Value]) -> list[Value]:
    """The mean of each value and those around it."""
    reach = max(1, round(len(ys) * SMOOTH_SHARE))
    return [_mean(ys[max(0, at - reach) : at + reach + 1]) for at in range(len(ys))]


def _mean(values: Sequence[Value]) -> Value:
    numbers = [value for value in values if _is_number(value)]
    return sum(numbers) / len(numbers) if numbers else None


def _is_number(value: Value) -> TypeGuard[float]:
    return value is not None and math.isfinite(value)


def nice_ticks(low: float, high: float, about: int = 4) -> list[float]:
    """Round numbers from below `low` to above `high`, a step of 1, 2 or 5 times a power of ten apart."""
    if high - low < 1e-12 * max(abs(low), abs(high), 1e-12):
        spread = abs(high) * 0.1 or 1.0
        low, high = low - spread, high + spread
    rough = (high - low) / about
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * times for times in (1, 2, 5, 10) if power * times >= rough * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(number * step, 12) for number in range(first, last + 1)]


def short(value: float, *, percent: bool = False) -> str:
    """A number for an axis or a tile."""
    if percent:
        return f"{value * 100:.3g}%"
    size = abs(value)
    for limit, divisor, unit in ((1e9, 1e9, "G"), (1e6, 1e6, "M"), (1e4, 1e3, "k")):
        if size >= limit:
            return f"{value / divisor:.3g}{unit}"
    return "0" if size < 1e-12 else f"{value:.3g}" if size < 1e3 else f"{value:.0f}"
