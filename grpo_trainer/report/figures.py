"""What the page draws, as data for its scripts: the table of figures, their lines, and samples.

A long run makes a small page: lines are thinned, and samples are those of steps that are spread over the run.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Any, TypeGuard

from grpo_trainer.report.read import Run

TRAINING, EVALUATION, ENVIRONMENTS, MACHINE, OTHER = "Training", "Evaluation", "Environments", "Machine", "More metrics"
"""Headings, in their order on the page."""
TIME_SPLIT, HISTOGRAM, QUANTILES = "Where the time went", "Rewards by value", "Reward distribution"
"""Titles; of the last two, a run has the histogram if its rewards have few values, and else the quantiles."""
SHARE = "reward/share/"
PHASES = {
    "waiting for rollouts": "train/data_fetch_time",
    "forward and backward": "train/forward_backward_time",
    "optimizer": "train/optimizer_time",
    "publishing weights": "train/sync_time",
    "copying checkpoints": "train/save_time",
}
"""What training does or waits for, one after the other."""


@dataclass(frozen=True)
class Figure:
    """A plot of some keys; a key that ends in `*` stands for all that begin so."""

    title: str
    keys: Mapping[str, str]
    """Key of metrics.jsonl -> its name in the plot."""
    note: str = ""
    percent: bool = False
    section: str = TRAINING
    bands: Mapping[str, str] = field(default_factory=dict)
    """Key -> the lower key down to which the space is filled."""


FIGURES = (
    Figure("Reward", {"reward/mean": "mean", "reward/env/*": ""}, "mean of the step's samples"),
    Figure(
        QUANTILES,
        {
            **{"reward/max": "highest", "reward/p75": "3 of 4 below", "reward/median": "median"},
            **{"reward/p25": "1 of 4 below", "reward/min": "lowest"},
        },
        "of the step's samples",
        bands={"reward/max": "reward/min", "reward/p75": "reward/p25"},
    ),
    Figure("Reward spread", {"reward/std": "all", "reward/env_std/*": ""}, "standard deviation"),
    Figure("Loss", {"train/loss": "loss"}, "about 0 is right on fresh samples"),
    Figure(
        "KL",
        {"alignment/kl_reference": "from the reference", "alignment/kl_rollout": "from the server's policy"},
        "nats a token",
    ),
    Figure("Entropy", {"grpo/entropy": "entropy"}, "nats a token; a fall to 0 is a policy that tries nothing new"),
    Figure(
        "Clipped tokens",
        {"grpo/clipped_fraction": "all", "grpo/clipped_low": "below", "grpo/clipped_high": "above"},
        "share whose ratio is clipped",
        percent=True,
    ),
    Figure("Ratio", {"grpo/mean_ratio": "mean", "grpo/max_ratio": "largest"}, "trainer's over server's probability"),
    Figure("Groups that teach nothing", {"batch/zero_variance_share": "share"}, "all rewards the same", percent=True),
    Figure("Gradient norm", {"train/grad_norm": "norm"}, "before clipping"),
    Figure("Learning rate", {"train/lr": "lr"}),
    Figure("Staleness", {"rollout/staleness_mean": "mean", "rollout/staleness_max": "oldest"}, "versions behind"),
    Figure(
        "Length",
        {
            **{"length/completion_max": "longest", "length/completion_p90": "9 of 10 below"},
            **{"length/completion_mean": "mean", "length/completion_p10": "1 of 10 below"},
            **{"length/completion_min": "shortest"},
        },
        "trained tokens of a completion",
        bands={
            "length/completion_max": "length/completion_min",
            "length/completion_p90": "length/completion_p10",
        },
    ),
    Figure("Throughput", {"train/tokens_per_second": "tokens/s"}, "all tokens of a step over its wall-clock time"),
    Figure(
        "Server and trainer",
        {"alignment/logprob_diff_mean": "mean", "alignment/logprob_diff_max": "largest"},
        "difference of logprobs, nats a token",
    ),
    Figure(
        "GPU memory",
        {"gpu/memory_used_gib": "in use", "gpu/memory_trainer_gib": "trainer"},
        "GiB of the trainer's first GPU",
        section=MACHINE,
    ),
    Figure("GPU utilisation", {"gpu/utilisation": "busy"}, "share of the time", percent=True, section=MACHINE),
    Figure(
        "Main memory", {"host/memory_used_gib": "in use", "host/memory_trainer_gib": "trainer"}, "GiB", section=MACHINE
    ),
    Figure("CPU utilisation", {"host/cpu": "busy"}, "of all cores", percent=True, section=MACHINE),
)
HIDDEN = ("train/seconds", "train/step_time", "publish/version", "publish/served_version")
MOST_LINES = 8
MOST_POINTS = 400
"""Of a line on the page; of more points, each is the mean of its neighbours."""
MOST_POINTS_IN_ALL = 1000
"""Of one figure of all runs together."""

Value = float | None


@dataclass(frozen=True)
class Line:
    """One line; where `ys` is None it has a gap."""

    name: str
    xs: Sequence[float]
    ys: Sequence[Value]
    key: str = ""
    """Of metrics.jsonl, if it is one figure of it."""
    run: int = 0
    """The number of its run on the page."""
    colour: int = 0
    dash: int = 0
    """0: solid."""
    marked: bool = False
    """Every point has a marker, because there are few."""
    band: int | None = None
    """How many lines further on the line is down to which the space is filled; None: it is not."""


@dataclass(frozen=True)
class Plot:
    """A figure with its lines."""

    title: str
    lines: Sequence[Line]
    note: str = ""
    section: str = ""
    stacked: bool = False
    """Lines are shares of a whole, one upon the other."""
    percent: bool = False
    """Values are shares, written as such."""


def all_plots(runs: Sequence[Run]) -> list[Plot]:
    """Return every figure that has numbers, section by section."""
    keys = sorted({key for run in runs for key in run.series})
    # One figure for each that environments measured on held-out items, with its confidence interval if it has one.
    found = {key for key in keys if key.startswith("eval/") and not key.endswith("/samples")}
    bounds = {key for key in found if key.endswith(("_low", "_high")) and key.rpartition("_")[0] in found}
    figures = [*FIGURES]
    figures += [
        Figure(
            key.removeprefix("eval/"),
            {f"{key}_high": "at most", key: "measured", f"{key}_low": "at least"},
            "on held-out items" + (", and its confidence interval" if f"{key}_low" in bounds else ""),
            section=EVALUATION,
            bands={f"{key}_high": f"{key}_low"},
        )
        for key in sorted(found - bounds)
    ]
    figures += [
        Figure(key.removeprefix("env/"), {key: "measured"}, section=ENVIRONMENTS) for key in keys if key[:4] == "env/"
    ]
    plots = [plot for figure in figures if (plot := _plot(runs, figure)).lines]
    if histograms := [_stacked(run, at, len(runs), HISTOGRAM) for at, run in enumerate(runs) if _shares(run)]:
        plots = [plots[0], *histograms, *(plot for plot in plots[1:] if plot.title != QUANTILES)]
    plots += [_stacked(run, at, len(runs), TIME_SPLIT) for at, run in enumerate(runs) if run.rows]
    shown = {key for figure in figures for run in runs for key in _keys_of(run, figure)} | {*PHASES.values(), *HIDDEN}
    others = [key for key in keys if key not in shown and not key.startswith(("reward/env", SHARE))]
    plots += [_plot(runs, Figure(key, {key: key}, section=OTHER)) for key in others]
    order = (TRAINING, EVALUATION, ENVIRONMENTS, MACHINE, OTHER)
    return sorted(plots, key=lambda plot: order.index(plot.section))


def _plot(runs: Sequence[Run], figure: Figure) -> Plot:
    """In a comparison the colour says which run, in a single run which key; edges of bands are dashed."""
    names = {key: name for run in runs for key, name in _keys_of(run, figure).items()}
    keys, edges = [*names][:MOST_LINES], {*figure.bands, *figure.bands.values()}
    lines: list[Line] = []
    for number, run in enumerate(runs):
        own = [key for key in keys if key in run.series]
        for index, key in enumerate(own):
            lower, place = figure.bands.get(key), keys.index(key)
            lines.append(
                Line(
                    names[key] if len(figure.keys) > 1 else "",
                    run.series[key].steps,
                    run.series[key].values,
                    key=key,
                    run=number,
                    colour=place if len(runs) == 1 and not edges else number,
                    dash=int(key in edges) if edges else place,
                    marked=figure.section == EVALUATION,
                    band=own.index(lower) - index if lower in own else None,
                )
            )
    return Plot(figure.title, lines, figure.note, figure.section, percent=figure.percent)


def _keys_of(run: Run, figure: Figure) -> dict[str, str]:
    """The figure's keys that the run has, with their names."""
    found: dict[str, str] = {}
    for key, name in figure.keys.items():
        if key.endswith("*"):
            several = [each for each in run.series if each.startswith(key[:-1])]
            if len(several) > 1:  # one environment's reward is the mean itself
                found |= {each: each.removeprefix(key[:-1]) for each in several}
        elif key in run.series:
            found[key] = name
    return found


def _shares(run: Run) -> list[str]:
    """The keys that say how often each reward was given, the lowest reward first."""
    found = (key for key in run.series if re.fullmatch(rf"{SHARE}-?[0-9]+(?:\.[0-9]+)?(?:e[+-]?[0-9]+)?", key))
    return sorted(found, key=lambda key: float(key.removeprefix(SHARE)))


def _stacked(run: Run, number: int, runs: int, title: str) -> Plot:
    """Parts of a whole at each step: seconds by phase, or shares of each reward in the step's samples."""

    def numbers(key: str) -> list[float]:
        return [float(row.get(key) or 0.0) for row in run.rows]

    if title == TIME_SPLIT:
        parts = {name: numbers(key) for name, key in PHASES.items() if key in run.series}
        known = map(sum, zip(*parts.values(), strict=True)) if parts else [0.0] * len(run.rows)
        whole = numbers("train/seconds")
        parts["other"] = [max(0.0, all_of_it - some) for all_of_it, some in zip(whole, known, strict=True)]
    else:
        parts = {key.removeprefix(SHARE): numbers(key) for key in _shares(run)}
    steps = [float(row["step"]) for row in run.rows]
    lines = [
        Line(name, steps, values, run=number, colour=at if runs == 1 else runs + at)  # not the runs' own colours
        for at, (name, values) in enumerate(parts.items())
    ]
    own, note = title if runs == 1 else f"{title}: {run.name}", "share of the step's samples"
    note = "seconds of each step" if title == TIME_SPLIT else note
    return Plot(own, lines, note, TRAINING, stacked=True, percent=title == HISTOGRAM)


# Data for the scripts ----------------------------------------------------------------------------------------


def page_data(runs: Sequence[Run]) -> dict[str, Any]:
    """Return everything that the scripts draw; `xs` of a line is the number of its `places`."""
    most = min(MOST_POINTS, max(50, MOST_POINTS_IN_ALL // len(runs)))
    places: dict[tuple[Value, ...], int] = {}  # most lines share theirs
    plots = []
    for plot in all_plots(runs):
        lines = []
        for line in plot.lines:
            thin = thinned(line, most)
            xs = places.setdefault(tuple(rounded(x, 7) for x in thin.xs), len(places))
            lines.append({**vars(line), "xs": xs, "ys": [rounded(y) for y in thin.ys]})
        plots.append({**vars(plot), "lines": lines})
    with_samples = [(number, run) for number, run in enumerate(runs) if run.samples]
    share = MOST_BYTES // max(len(with_samples), 1)
    return {
        "runs": [_run_data(run) for run in runs],
        "plots": plots,
        "places": [*places],
        "samples": [sample_data(run.samples, number, share) for number, run in with_samples],
    }


def _run_data(run: Run) -> dict[str, Any]:
    """Its seconds of training at some steps, and what is marked in its plots."""
    seconds, total = [], 0.0
    for row in run.rows:
        total += row.get("train/seconds") or 0.0
        seconds.append(total)
    steps = [float(row["step"]) for row in run.rows]
    clock = thinned(Line("", steps, seconds))
    return {
        "name": run.name,
        "steps": [rounded(step, 7) for step in clock.xs],
        "seconds": [rounded(value, 6) for value in clock.ys],
        "resumed": run.resumed,
        "episodes": [
            {"key": each.sign.check.key, "ends": [steps[each.first], steps[each.last]]}
            for own in run.unhealthy.values()
            for each in own
        ],
    }


def thinned(line: Line, most: int = MOST_POINTS) -> Line:
    """Return at most `most` points, each the mean of its neighbours."""
    each = -(-len(line.xs) // most)
    if each <= 1:
        return line
    parts = [slice(at, at + each) for at in range(0, len(line.xs), each)]
    numbers = ([value for value in line.ys[part] if _is_number(value)] for part in parts)
    ys = [fmean(values) if values else None for values in numbers]
    return replace(line, xs=[fmean(line.xs[part]) for part in parts], ys=ys)


def rounded(value: Value, digits: int = 4) -> Value:
    """Return the number rounded to `digits` significant digits; None if the value is not a finite number."""
    if not _is_number(value):
        return None
    short = float(f"{value:.{digits}g}")
    return int(short) if short.is_integer() and abs(short) < 1e15 else short


def _is_number(value: Value) -> TypeGuard[float]:
    return value is not None and math.isfinite(value)


MOST_BYTES = 800_000
"""Of all samples on a page."""
SEPARATOR = "\x1f"
"""Between tokens; no tokenizer makes it of text."""
UNKNOWN, NOT_TRAINED, SAME = "~", "!", ord("P")
"""In the place of a ratio: it is not known, the token is not trained; a ratio of 1."""
UNIT, MOST_UNITS = 0.04, 28
"""A ratio is e to this, times the distance of its character from `SAME`: 4 % is what a reader can tell apart."""


def sample_data(rows: Sequence[Mapping[str, Any]], run: int, most: int = MOST_BYTES) -> dict[str, Any]:
    """Return the samples of one run: all of them, or those of steps that are evenly spread."""
    by_step: dict[int, list[dict[str, Any]]] = {}
    for row in rows:
        by_step.setdefault(row["step"], []).append(_sample(row))
    sizes = {step: len(json.dumps(own, ensure_ascii=False).encode()) for step, own in by_step.items()}
    kept = steps = sorted(by_step)
    while len(kept) > 1 and (size := sum(sizes[step] for step in kept)) > most:
        kept = evenly(steps, max(1, min(len(kept) - 1, int(len(kept) * most / size))))
    return {"run": run, "of": len(rows), "samples": [sample for step in kept for sample in by_step[step]]}


def evenly(steps: Sequence[int], count: int) -> list[int]:
    """Return `count` steps at even distances, the first and the last included; if `count` is 1, the last."""
    if count == 1:
        return [steps[-1]]
    return [steps[round(at * (len(steps) - 1) / (count - 1))] for at in range(count)]


def _sample(row: Mapping[str, Any]) -> dict[str, Any]:
    pieces = zip(row["ratios"], row["trained"], strict=True)
    return {
        **{key: row[key] for key in ("step", "version", "environment", "group", "cut", "prompt")},
        **{key: round(row[key], 4) for key in ("reward", "advantage")},
        "pieces": SEPARATOR.join(piece.replace(SEPARATOR, "") for piece in row["pieces"]),
        "ratios": "".join(character(ratio, trained=trained) for ratio, trained in pieces),
    }


def character(ratio: float | None, *, trained: bool) -> str:
    """Return one character for a token: how much likelier the policy makes it than it was when it was sampled."""
    if not trained:
        return NOT_TRAINED
    if ratio is None:
        return UNKNOWN
    units = round(math.log(max(ratio, 1e-9)) / UNIT)
    return chr(SAME + max(-MOST_UNITS, min(MOST_UNITS, units)))
