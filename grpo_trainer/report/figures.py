"""Which metrics make which plot."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from grpo_trainer.logs.times import PHASES
from grpo_trainer.report.plots import Line, Plot
from grpo_trainer.report.read import Run

TRAINING, EVALUATION, ENVIRONMENTS, MACHINE, OTHER = "Training", "Evaluation", "Environments", "Machine", "More metrics"
"""Headings, in their order on the page."""

TIME_SPLIT, HISTOGRAM, QUANTILES = "Where the time went", "Rewards by value", "Reward distribution"
"""Titles; of the last two, a run has the histogram if its rewards have few values, and else the quantiles."""
SHARE = "reward/share/"


@dataclass(frozen=True)
class Figure:
    """A plot of some keys; a key that ends in `*` stands for all that begin so.

    Attributes:
        bands: key -> the lower key down to which the space is filled.
    """

    title: str
    keys: Mapping[str, str]  # key -> its name in the plot
    note: str = ""
    percent: bool = False
    section: str = TRAINING
    bands: Mapping[str, str] = field(default_factory=dict)


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
        "Main memory",
        {"host/memory_used_gib": "in use", "host/memory_trainer_gib": "trainer"},
        "GiB",
        section=MACHINE,
    ),
    Figure("CPU utilisation", {"host/cpu": "busy"}, "of all cores", percent=True, section=MACHINE),
)

HIDDEN = ("train/seconds", "train/step_time", "publish/version", "publish/served_version")
MOST_LINES = 8


def all_plots(runs: Sequence[Run]) -> list[Plot]:
    """Every figure that has numbers, section by section."""
    figures = [*FIGURES, *_evaluations(runs), *_of_environments(runs)]
    plots = [plot for figure in figures if (plot := _plot(runs, figure)).lines]
    if histograms := [_histogram(run, number, len(runs)) for number, run in enumerate(runs) if _shares(run)]:
        plots = [plots[0], *histograms, *(plot for plot in plots[1:] if plot.title != QUANTILES)]
    splits = [time_split(run, number, len(runs)) for number, run in enumerate(runs) if run.rows]
    plots = [*plots, *splits, *_others(runs, figures)]
    order = (TRAINING, EVALUATION, ENVIRONMENTS, MACHINE, OTHER)
    return sorted(plots, key=lambda plot: order.index(plot.section))


def _evaluations(runs: Sequence[Run]) -> list[Figure]:
    """One for each figure that environments measured on held-out items, with its confidence interval if it has one."""
    found = {key for run in runs for key in run.series if key.startswith("eval/") and not key.endswith("/samples")}
    bounds = {key for key in found if key.endswith(("_low", "_high")) and key.rpartition("_")[0] in found}
    return [
        Figure(
            key.removeprefix("eval/"),
            {f"{key}_high": "at most", key: "measured", f"{key}_low": "at least"},
            "on held-out items" + (", and its confidence interval" if f"{key}_low" in bounds else ""),
            section=EVALUATION,
            bands={f"{key}_high": f"{key}_low"},
        )
        for key in sorted(found - bounds)
    ]


def _of_environments(runs: Sequence[Run]) -> list[Figure]:
    """One for each figure that environments wrote themselves: parts of the reward, lengths, groups."""
    found = sorted({key for run in runs for key in run.series if key.startswith("env/")})
    return [Figure(key.removeprefix("env/"), {key: "measured"}, section=ENVIRONMENTS) for key in found]


def _others(runs: Sequence[Run], figures: Sequence[Figure]) -> list[Plot]:
    """One for each metric that no figure shows."""
    shown = {key for figure in figures for run in runs for key in _keys_of(run, figure)}
    shown |= {*PHASES.values(), *HIDDEN}
    shown |= {key for run in runs for key in run.series if key.startswith(("reward/env", SHARE))}
    left = sorted({key for run in runs for key in run.series} - shown)
    return [_plot(runs, Figure(key, {key: key}, section=OTHER)) for key in left]


def _plot(runs: Sequence[Run], figure: Figure) -> Plot:
    """In a comparison the colour says which run, in a single run which key; edges of bands are dashed."""
    names = {key: name for run in runs for key, name in _keys_of(run, figure).items()}
    keys, edges = [*names][:MOST_LINES], {*figure.bands, *figure.bands.values()}
    lines: list[Line] = []
    for number, run in enumerate(runs):
        own = [key for key in keys if key in run.series]
        for index, key in enumerate(own):
            lower = figure.bands.get(key)
            place = keys.index(key)
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


def time_split(run: Run, number: int, runs: int) -> Plot:
    """Seconds of each step by phase."""
    parts: dict[str, list[float]] = {name: _numbers(run, key) for name, key in PHASES.items() if key in run.series}
    known = [sum(values) for values in zip(*parts.values(), strict=True)] if parts else [0.0] * len(run.rows)
    whole = _numbers(run, "train/seconds")
    parts["other"] = [max(0.0, all_of_it - some) for all_of_it, some in zip(whole, known, strict=True)]
    return _stacked(run, number, runs, TIME_SPLIT, "seconds of each step", parts)


def _shares(run: Run) -> list[str]:
    """The keys that say how often each reward was given, the lowest reward first."""
    found = (key for key in run.series if re.fullmatch(rf"{SHARE}-?[0-9]+(?:\.[0-9]+)?(?:e[+-]?[0-9]+)?", key))
    return sorted(found, key=lambda key: float(key.removeprefix(SHARE)))


def _histogram(run: Run, number: int, runs: int) -> Plot:
    """Share of each reward in the step's samples."""
    parts = {key.removeprefix(SHARE): _numbers(run, key) for key in _shares(run)}
    return _stacked(run, number, runs, HISTOGRAM, "share of the step's samples", parts, percent=True)


def _stacked(
    run: Run, number: int, runs: int, title: str, note: str, parts: Mapping[str, list[float]], *, percent: bool = False
) -> Plot:
    steps = [float(row["step"]) for row in run.rows]
    lines = [
        Line(name, steps, values, run=number, colour=at if runs == 1 else runs + at)  # not the runs' own colours
        for at, (name, values) in enumerate(parts.items())
    ]
    own = title if runs == 1 else f"{title}: {run.name}"
    return Plot(own, lines, note, TRAINING, stacked=True, percent=percent)


def _numbers(run: Run, key: str) -> list[float]:
    return [float(row.get(key) or 0.0) for row in run.rows]
