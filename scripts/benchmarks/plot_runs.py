"""Curves of several runs in one picture: `python scripts/benchmarks/plot_runs.py dapo=runs/a gspo=runs/b --out c.png`.

A run is a folder or its metrics.jsonl, with a label; runs of the same label (other seeds) have the same colour. Thin
lines are the values, thick ones the mean of `--smooth` values around each. A key with KEY_low and KEY_high, as those of
evaluations, is drawn with its interval. Each `--y` is a row of two panels: over steps, and over seconds of training
(the sum of `train/seconds`). Needs matplotlib.
"""

from __future__ import annotations

import argparse
import sys
from itertools import accumulate
from pathlib import Path
from statistics import fmean
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from grpo_trainer.files import METRICS_FILE
from grpo_trainer.metrics.rows import read_rows

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
"""Okabe and Ito's, which the colour-blind can tell apart (https://jfly.uni-koeln.de/color/)."""


def panel(axis: Any, xs: list[float], rows: list[dict[str, Any]], key: str, window: int, colour: str) -> Any:
    """Draw one key of a run; return its line. Rows without the key are left out."""
    points = [(x, row) for x, row in zip(xs, rows, strict=True) if row.get(key) is not None]
    if not points:
        sys.exit(f"{key} is in no row; rows have {', '.join(sorted({name for row in rows for name in row}))}")
    places, values = [x for x, _ in points], [row[key] for _, row in points]
    if f"{key}_low" in points[0][1]:
        low, high = ([row[f"{key}_{bound}"] for _, row in points] for bound in ("low", "high"))
        axis.fill_between(places, low, high, color=colour, alpha=0.15, linewidth=0)
        window = 1
    means = [fmean(values[max(0, at - (window - 1) // 2) : at + window // 2 + 1]) for at in range(len(values))]
    axis.plot(places, values, color=colour, linewidth=0.8, alpha=0.3)
    return axis.plot(places, means, color=colour, linewidth=1.8)[0]


def main() -> None:
    """Write the picture, in the format that the name of `--out` ends with."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", metavar="LABEL=FILE", help="metrics.jsonl, or its folder")
    parser.add_argument("--out", required=True, type=Path, metavar="FILE", help="the picture: .png, .svg, .pdf")
    parser.add_argument("--y", action="append", metavar="KEY", help="of the rows; repeatable (default: reward/mean)")
    parser.add_argument("--smooth", type=int, default=5, metavar="N", help="mean of N around each (default: 5)")
    given = parser.parse_args()
    keys = given.y or ["reward/mean"]
    figure = Figure(figsize=(10.0, 0.6 + 3.1 * len(keys)), facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(keys), 2, squeeze=False)
    lines: dict[str, Any] = {}
    colours: dict[str, str] = {}
    for label, _, name in (run.partition("=") for run in given.runs):
        path = Path(name) / METRICS_FILE if Path(name).is_dir() else Path(name)
        rows = [dict(row) for row in read_rows(path)]
        colour = colours.setdefault(label, COLOURS[len(colours) % len(COLOURS)])
        steps = [row["step"] for row in rows]
        seconds = list(accumulate(row["train/seconds"] for row in rows))
        for row_of_axes, key in zip(axes, keys, strict=True):
            for axis, xs, unit in zip(row_of_axes, (steps, seconds), ("step", "seconds of training"), strict=True):
                lines[label] = panel(axis, xs, rows, key, given.smooth, colour)
                axis.set(xlabel=unit, ylabel=key)
                axis.grid(alpha=0.3)
    figure.legend(lines.values(), lines.keys(), loc="outside lower center", ncols=min(3, len(lines)), frameon=False)
    given.out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(given.out, dpi=130)


if __name__ == "__main__":
    main()
