"""Curves of several runs in one picture: `python scripts/plot_runs.py dapo=runs/a gspo=runs/b --out curves.png`.

A run is a folder or its metrics.jsonl, with a label; runs of the same label (other seeds) have the same colour. Thin
lines are the values, thick ones the mean of some around each (`--smooth`). A key with KEY_low and KEY_high, as those of
evaluations, is drawn as it is, with its interval. Several `--y` make several pictures in one, each over steps, over
seconds of training (the sum of `train/seconds`, so without the start and the break before a `--resume`), or both. Needs
matplotlib.
"""

from __future__ import annotations

import argparse
import difflib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpo_trainer.files import METRICS_FILE
from grpo_trainer.metrics.rows import read_rows

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
"""Okabe and Ito's, which the colour-blind can tell apart (https://jfly.uni-koeln.de/color/)."""
DASHES = ("-", "--", "-.", ":")
"""One more for every time that the colours are used up."""
NAMES = {
    "step": "step",
    "seconds": "seconds of training",
    "reward/mean": "mean reward",
    "grpo/entropy": "entropy (nats a token)",
    "train/grad_norm": "gradient norm",
    "grpo/clipped_fraction": "share of tokens clipped",
    "rollout/staleness_mean": "staleness (versions)",
    "length/completion_mean": "mean length of a completion (tokens)",
    "eval/word_problems/accuracy": "held-out accuracy",
    "accuracy": "held-out accuracy",
}
"""What axes are called; others by their key."""


class PlotError(ValueError):
    """What was asked for can't be drawn; the message names file, got, wanted and fix."""


@dataclass(frozen=True)
class Curves:
    """One run's numbers, a step each; NaN where a step has none.

    Attributes:
        xs: "step" and "seconds" (since training began) -> places.
        ys: key of metrics.jsonl -> values, and those of its interval (KEY_low, KEY_high) if it has one.
    """

    label: str
    xs: Mapping[str, Sequence[float]]
    ys: Mapping[str, Sequence[float]]

    def points(self, key: str, x: str) -> tuple[list[float], list[float]]:
        """Return places and values of the steps that have the key."""
        pairs = [pair for pair in zip(self.xs[x], self.ys[key], strict=True) if not math.isnan(pair[1])]
        return [place for place, _ in pairs], [value for _, value in pairs]


def read_curves(label: str, path: Path, keys: Sequence[str]) -> Curves:
    """Read a run's folder, or its metrics.jsonl.

    Raises:
        PlotError: there is no such file, or a key is in none of its rows.
    """
    path = path / METRICS_FILE if path.is_dir() else path
    if not path.is_file():
        raise PlotError(f"{label}: no file {path}; wanted LABEL=FILE, a run's {METRICS_FILE} or its folder")
    rows = read_rows(path)
    known = sorted({key for row in rows for key in row})
    for key in ("step", "train/seconds", *keys):
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            advice = f"did you mean {near[0]}?" if near else f"it has {', '.join(known) or 'no rows'}"
            raise PlotError(f"{path}: {key} is in none of its rows; {advice}")
    seconds = list(accumulate(_number(row, "train/seconds") for row in rows))
    xs = {"step": [_number(row, "step") for row in rows], "seconds": seconds}
    drawn = [name for key in keys for name in (key, f"{key}_low", f"{key}_high") if name in known]
    return Curves(label, xs, {key: [_number(row, key) for row in rows] for key in drawn})


def _number(row: Mapping[str, Any], key: str) -> float:
    """What is not finite is null in the file."""
    value = row.get(key)
    return math.nan if value is None else float(value)


def smoothed(values: Sequence[float], window: int) -> list[float]:
    """The mean of each value and those around it, `window` in all, fewer at the ends."""
    spans = (values[max(0, at - (window - 1) // 2) : at + window // 2 + 1] for at in range(len(values)))
    return [sum(span) / len(span) for span in spans]


def draw(runs: Sequence[Curves], keys: Sequence[str], xs: Sequence[str], *, window: int, title: str, out: Path) -> None:
    """Write the picture, in the format that the name of `out` ends with.

    Args:
        keys, xs: a panel for each pair of them.
        window: values that a point of a thick line is the mean of; 1: there are no thin ones.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    panels = [(key, x) for key in keys for x in xs]
    columns = min(2, len(panels))
    lines = -(-len(panels) // columns)
    figure = Figure(figsize=(5.0 * columns, 0.6 + 3.1 * lines), facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(lines, columns, squeeze=False).ravel()
    for axis, (key, x) in zip(axes, panels, strict=False):
        _panel(axis, runs, key, x, window)
    for axis in axes[len(panels) :]:
        axis.remove()
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=min(3, len(labels)), frameon=False)
    if title:
        figure.suptitle(title)
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=130)


def _panel(axis: Axes, runs: Sequence[Curves], key: str, x: str, smooth: int) -> None:
    """One key of all runs over one x."""
    numbers = {label: number for number, label in enumerate(dict.fromkeys(run.label for run in runs))}
    for run in runs:
        round_, number = divmod(numbers[run.label], len(COLOURS))
        colour, dash = COLOURS[number], DASHES[round_ % len(DASHES)]
        (places, values), window = run.points(key, x), smooth
        if f"{key}_low" in run.ys:
            window = 1
            low, high = (run.points(f"{key}_{bound}", x)[1] for bound in ("low", "high"))
            axis.fill_between(places, low, high, color=colour, alpha=0.15, linewidth=0)
        if window > 1:
            axis.plot(places, values, color=colour, linestyle=dash, linewidth=0.8, alpha=0.3)
        label = "" if run.label in axis.get_legend_handles_labels()[1] else run.label
        axis.plot(places, smoothed(values, window), color=colour, linestyle=dash, linewidth=1.8, label=label)
    axis.set_xlabel(NAMES[x])
    axis.set_ylabel(NAMES.get(key, key))
    axis.grid(alpha=0.3)
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)


def _labelled(argument: str) -> tuple[str, Path]:
    label, _, path = argument.partition("=")
    if not (label and path):
        raise argparse.ArgumentTypeError(f"got {argument!r}, wanted LABEL=FILE")
    return label, Path(path)


def _positive(argument: str) -> int:
    if not argument.isdigit() or int(argument) < 1:
        raise argparse.ArgumentTypeError(f"got {argument!r}, wanted a whole number from 1")
    return int(argument)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=_labelled, metavar="LABEL=FILE", help="metrics.jsonl, or its folder")
    parser.add_argument("--out", required=True, type=Path, metavar="FILE", help="the picture: .png, .svg, .pdf")
    parser.add_argument("--x", choices=("step", "time", "both"), default="both", help="over steps, seconds, or both")
    parser.add_argument("--y", action="append", metavar="KEY", help="of the rows; repeatable (default: reward/mean)")
    parser.add_argument("--smooth", type=_positive, default=5, metavar="N", help="mean of N around each (default: 5)")
    parser.add_argument("--title", default="", help="above the picture")
    given = parser.parse_args(arguments)
    keys = given.y or ["reward/mean"]
    xs = {"step": ["step"], "time": ["seconds"], "both": ["step", "seconds"]}[given.x]
    try:
        runs = [read_curves(label, path, keys) for label, path in given.runs]
    except PlotError as error:
        parser.error(str(error))
    draw(runs, keys, xs, window=given.smooth, title=given.title, out=given.out)


if __name__ == "__main__":
    main()
