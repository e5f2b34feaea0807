"""Which metrics make which plot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from grpo_trainer.logs.times import PHASES
from grpo_trainer.report.plots import Line, Plot
from grpo_trainer.report.read import Run


@dataclass(frozen=True)
class Figure:
    """A plot of some keys; a key that ends in `*` stands for all that begin so."""

    title: str
    keys: Mapping[str, str]  # key -> its name in the plot
    note: str = ""
    percent: bool = False


FIGURES = (
    Figure("Reward", {"reward/mean": "mean", "reward/env_*": "environment"}, "mean of the step's samples"),
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
    Figure("Length", {"length/completion_mean": "mean", "length/completion_max": "longest"}, "trained tokens"),
    Figure("Throughput", {"train/tokens_per_second": "tokens/s"}, "all tokens of a step over its wall-clock time"),
    Figure(
        "Server and trainer",
        {"alignment/logprob_diff_mean": "mean", "alignment/logprob_diff_max": "largest"},
        "difference of logprobs, nats a token",
    ),
)

OVER_TIME, TIME_SPLIT = "Reward over time", "Where the time went"
"""Titles of plots that are made of several metrics."""
HIDDEN = ("reward/std", "train/seconds", "train/step_time", "publish/version", "publish/served_version")
MOST_LINES = 8
EVALUATIONS = "eval/"
"""What environments measured on held-out items: `eval/ENVIRONMENT/FIGURE`, each of its own scale."""


def main_plots(runs: Sequence[Run]) -> list[Plot]:
    """Reward over time, the figures that have numbers, and where the time went."""
    plots = [plot for figure in FIGURES if (plot := _plot(runs, figure)).lines]
    over_time = [
        Line(run.name, _seconds(run), run.values("reward/mean"), colour)
        for colour, run in enumerate(runs)
        if "reward/mean" in run.keys
    ]
    if over_time:
        plots.insert(1, Plot(OVER_TIME, over_time, "seconds of training", x_name="s"))
    plots += [_plot(runs, figure) for figure in _evaluations(runs)]
    return [*plots, *(time_split(run, len(runs)) for run in runs if run.rows)]


def _evaluations(runs: Sequence[Run]) -> list[Figure]:
    """One for each figure that environments measured, with its confidence interval if it has one."""
    found = {key for run in runs for key in run.keys if key.startswith(EVALUATIONS)}
    bounds = {key for key in found if key.endswith(("_low", "_high")) and key.rpartition("_")[0] in found}
    return [
        Figure(
            f"Evaluation: {key.removeprefix(EVALUATIONS)}",
            {key: "measured", f"{key}_low": "at least", f"{key}_high": "at most"},
            "on held-out items" + (", and its confidence interval" if f"{key}_low" in bounds else ""),
        )
        for key in sorted(found - bounds)
    ]


def other_plots(runs: Sequence[Run]) -> list[Plot]:
    """One for each metric that no figure shows."""
    shown = {key for figure in FIGURES for run in runs for key in _keys_of(run, figure)}
    shown |= {*PHASES.values(), *HIDDEN}
    left = sorted({key for run in runs for key in run.keys if not key.startswith(EVALUATIONS)} - shown)
    return [_plot(runs, Figure(key, {key: key})) for key in left]


def _plot(runs: Sequence[Run], figure: Figure) -> Plot:
    """In a comparison the colour says which run, in a single run which key."""
    alone = len(runs) == 1
    lines = []
    for number, run in enumerate(runs):
        for index, (key, name) in enumerate(_keys_of(run, figure).items()):
            first = key == next(iter(figure.keys))
            label = name if alone else run.name if first else f"{run.name}, {name}"
            measured = [row for row in run.rows if key in row]  # an evaluation is not made at each step
            steps, values = [float(row["step"]) for row in measured], [row[key] for row in measured]
            lines.append(Line(label, steps, values, index if alone else number, 0 if alone or first else 1))
    return Plot(figure.title, lines[: MOST_LINES * len(runs)], figure.note, percent=figure.percent)


def _keys_of(run: Run, figure: Figure) -> dict[str, str]:
    """The figure's keys that the run has, with their names."""
    found: dict[str, str] = {}
    for key, name in figure.keys.items():
        if key.endswith("*"):
            begin = key[:-1]
            several = [each for each in run.keys if each.startswith(begin) and not each.endswith(("_std", "/std"))]
            if len(several) > 1:  # one environment's reward is the mean itself
                found |= {each: f"{name} {each.removeprefix(begin)}" for each in several}
        elif key in run.keys:
            found[key] = name
    return found


def _seconds(run: Run) -> list[float]:
    """Of training, up to each step."""
    return list(accumulate(float(row.get("train/seconds") or 0.0) for row in run.rows))


def time_split(run: Run, runs: int) -> Plot:
    """Seconds of each step by phase."""
    parts: dict[str, list[float]] = {name: _numbers(run, key) for name, key in PHASES.items() if key in run.keys}
    known = [sum(values) for values in zip(*parts.values(), strict=True)] if parts else [0.0] * len(run.rows)
    whole = _numbers(run, "train/seconds")
    parts["other"] = [max(0.0, all_of_it - some) for all_of_it, some in zip(whole, known, strict=True)]
    steps = [float(row["step"]) for row in run.rows]
    lines = [Line(name, steps, values, colour) for colour, (name, values) in enumerate(parts.items())]
    title = TIME_SPLIT if runs == 1 else f"{TIME_SPLIT}: {run.name}"
    return Plot(title, lines, "seconds of each step", stacked=True)


def _numbers(run: Run, key: str) -> list[float]:
    return [float(value) if value is not None else 0.0 for value in run.values(key)]
