"""The report as a whole: plain HTML, and the data from which the page's scripts draw plots and samples."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from grpo_common.pages.document import document, plotting
from grpo_trainer.report import parts
from grpo_trainer.report.figures import all_plots
from grpo_trainer.report.plots import Line, plot_data, rounded, thinned
from grpo_trainer.report.read import Run
from grpo_trainer.report.samples import MOST_BYTES, sample_data

STATIC = Path(__file__).parent / "static"
SCRIPTS = ("controls.js", "samples.js")


def page(runs: Sequence[Run], *, made: datetime, refresh_seconds: int = 0) -> str:
    """The whole report, of one run, or of several side by side.

    Args:
        made: when; it is said on the page.
        refresh_seconds: the browser loads the page again after so long; 0: it does not.
    """
    alone = len(runs) == 1
    body = [f"<header><h1>{parts.text(' · '.join(run.name for run in runs))}</h1>"]
    state = "refreshed during the run" if refresh_seconds else "a snapshot"
    body.append(f"<small>grpo report, {made:%Y-%m-%d %H:%M:%S}, {state}</small></header>")
    body.append(parts.tiles(runs[0]) if alone else parts.comparison(runs))
    body += [parts.banner(run, None if alone else number) for number, run in enumerate(runs)]
    body += [parts.unreadable(run) for run in runs]
    body.append((STATIC / "controls.html").read_text())
    body.append('<main id="plots"></main>')
    if not alone:
        body.append(f"<h2>Options that differ</h2>{parts.differences(runs)}")
    body.append(_samples(runs))
    for run in runs:
        of_it = "" if alone else f" of {parts.text(run.name)}"
        if alone or run.timeline:
            body.append(f"<h2>Timeline{of_it}</h2>{parts.timeline(run)}")
        body.append(f"<h2>Events{of_it}</h2>{parts.events(run)}")
        body.append(f"<h2>Configuration{of_it}</h2>{parts.configuration(run)}")
    style, scripts = plotting()
    return document(
        f"{runs[0].name}: grpo report",
        "".join(body),
        style=style,
        scripts=[*scripts, *((STATIC / name).read_text() for name in SCRIPTS)],
        data=page_data(runs),
        refresh_seconds=refresh_seconds,
    )


def _samples(runs: Sequence[Run]) -> str:
    if not any(run.samples for run in runs):
        how = "None were logged: <code>--log-samples 4</code> writes four of each step."
        return f'<h2>Samples</h2><p class="dim">{how}</p>'
    return (STATIC / "samples.html").read_text()


def page_data(runs: Sequence[Run]) -> dict[str, Any]:
    """Everything that the scripts draw; `xs` of a line is the number of its `places`."""
    with_samples = [(number, run) for number, run in enumerate(runs) if run.samples]
    most = MOST_BYTES // max(len(with_samples), 1)
    plots = [{"section": plot.section, **plot_data(plot, len(runs))} for plot in all_plots(runs)]
    places: dict[tuple[float, ...], int] = {}  # most lines share theirs
    for line in (line for plot in plots for line in plot["lines"]):
        line["xs"] = places.setdefault(tuple(line["xs"]), len(places))
    return {
        "runs": [_run_data(run) for run in runs],
        "plots": plots,
        "places": [*places],
        "samples": [sample_data(run.samples, number, most) for number, run in with_samples],
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
