"""Lines and plots as data for the page's script, thinned so that a long run makes a small page."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeGuard

MOST_POINTS = 400
"""Of a line on the page; of more points, each is the mean of its neighbours."""
MOST_POINTS_IN_ALL = 1000
"""Of one figure of all runs together."""

Value = float | None


@dataclass(frozen=True)
class Line:
    """One line; where `ys` is None it has a gap.

    Attributes:
        key: of metrics.jsonl, if it is one figure of it.
        run: the number of its run on the page.
        xs: steps.
        colour: which of the page's.
        dash: which of the page's; 0: solid.
        marked: every point has a marker, because there are few.
        band: how many lines further on the line is down to which the space is filled; None: it is not.
    """

    name: str
    xs: Sequence[float]
    ys: Sequence[Value]
    key: str = ""
    run: int = 0
    colour: int = 0
    dash: int = 0
    marked: bool = False
    band: int | None = None


@dataclass(frozen=True)
class Plot:
    """A figure.

    Attributes:
        note: what to make of it.
        section: the heading that it stands under.
        stacked: lines are shares of a whole, one upon the other.
        percent: values are shares, written as such.
    """

    title: str
    lines: Sequence[Line]
    note: str = ""
    section: str = ""
    stacked: bool = False
    percent: bool = False


def thinned(line: Line, most: int = MOST_POINTS) -> Line:
    """At most `most` points, each the mean of its neighbours."""
    each = -(-len(line.xs) // most)
    if each <= 1:
        return line
    starts = range(0, len(line.xs), each)
    xs = [sum(line.xs[at : at + each]) / len(line.xs[at : at + each]) for at in starts]
    return replace(line, xs=xs, ys=[_mean(line.ys[at : at + each]) for at in starts])


def plot_data(plot: Plot, runs: int) -> dict[str, Any]:
    """The plot as JSON for the script."""
    most = min(MOST_POINTS, max(50, MOST_POINTS_IN_ALL // runs))
    return {
        **{"title": plot.title, "note": plot.note, "stacked": plot.stacked, "percent": plot.percent},
        "lines": [_line_data(thinned(line, most)) for line in plot.lines],
    }


def _line_data(line: Line) -> dict[str, Any]:
    return {
        **{"name": line.name, "key": line.key, "run": line.run, "colour": line.colour, "dash": line.dash},
        **{"marked": line.marked, "band": line.band},
        "xs": [rounded(x, 7) for x in line.xs],
        "ys": [rounded(y) for y in line.ys],
    }


def rounded(value: Value, digits: int = 4) -> Value:
    """Return the number rounded to `digits` significant digits; None if the value is not a finite number."""
    if not _is_number(value):
        return None
    short = float(f"{value:.{digits}g}")
    return int(short) if short.is_integer() and abs(short) < 1e15 else short


def _mean(values: Sequence[Value]) -> Value:
    numbers = [value for value in values if _is_number(value)]
    return sum(numbers) / len(numbers) if numbers else None


def _is_number(value: Value) -> TypeGuard[float]:
    return value is not None and math.isfinite(value)
