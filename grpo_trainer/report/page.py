"""The page as a whole: one file that asks nobody else for anything, in light and dark, on a phone as well.

Samples carry text from models: HTML is escaped, the script makes text of text only, and the page's own policy lets no
script run but those of `static/`, which it knows by their hashes. uPlot (MIT licence) draws the plots.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Sequence
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Any

from grpo_trainer.report import parts
from grpo_trainer.report.figures import all_plots
from grpo_trainer.report.plots import Line, plot_data, rounded, thinned
from grpo_trainer.report.read import Run
from grpo_trainer.report.samples import MOST_BYTES, sample_data

STATIC = Path(__file__).parent / "static"
SCRIPTS, STYLES = ("uPlot.min.js", "plots.js", "samples.js"), ("uPlot.min.css", "page.css")


@cache
def static(name: str) -> str:
    """A file that goes into the page."""
    return (STATIC / name).read_text()


def page(runs: Sequence[Run], *, made: datetime, refresh_seconds: int = 0) -> str:
    """The whole report, of one run or of several beside each other.

    Args:
        made: when; it is said on the page.
        refresh_seconds: the browser loads the page again after so long; 0: it does not.
    """
    alone = len(runs) == 1
    body = [f"<header><h1>{parts.text(' · '.join(run.name for run in runs))}</h1>"]
    state = "refreshed while the run goes on" if refresh_seconds else "a snapshot"
    body.append(f"<small>grpo report, {made:%Y-%m-%d %H:%M:%S}, {state}</small></header>")
    body.append(parts.tiles(runs[0]) if alone else parts.comparison(runs))
    body.append(static("controls.html"))
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
    return _document(runs, "".join(body), refresh_seconds)


def _samples(runs: Sequence[Run]) -> str:
    if not any(run.samples for run in runs):
        how = "None were logged: <code>--log-samples 4</code> writes four of each step."
        return f'<h2>Samples</h2><p class="dim">{how}</p>'
    return static("samples.html")


def page_data(runs: Sequence[Run]) -> dict[str, Any]:
    """Everything that the script draws; `xs` of a line is the number of its `places`."""
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
    """Its seconds of training at some steps, and the steps at which it was resumed."""
    seconds, total = [], 0.0
    for row in run.rows:
        total += row.get("train/seconds") or 0.0
        seconds.append(total)
    clock = thinned(Line("", [float(row["step"]) for row in run.rows], seconds))
    return {
        "name": run.name,
        "steps": [rounded(step, 7) for step in clock.xs],
        "seconds": [rounded(value, 6) for value in clock.ys],
        "resumed": run.resumed,
    }


def _document(runs: Sequence[Run], body: str, refresh_seconds: int) -> str:
    known = " ".join(f"'sha256-{_digest(static(name))}'" for name in SCRIPTS)
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src {known}; img-src data:"
    refresh = f'<meta http-equiv="refresh" content="{refresh_seconds}">' if refresh_seconds else ""
    data = json.dumps(page_data(runs), separators=(",", ":"), ensure_ascii=False).replace("<", "\\u003c")
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">{refresh}'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><link rel="icon" href="data:,">'
        f"<title>{parts.text(runs[0].name)}: grpo report</title>"
        f"<style>{''.join(map(static, STYLES))}</style></head>"
        f'<body>{body}<script type="application/json" id="data">{data}</script>'
        f"<!-- uPlot: {static('uPlot.LICENSE')} -->"
        f"{''.join(f'<script>{static(name)}</script>' for name in SCRIPTS)}</body></html>\n"
    )


def _digest(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
