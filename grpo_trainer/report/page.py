"""The page as a whole: one file that asks nobody else for anything, in light and dark, on a phone as well.

Samples carry text from models: everything is escaped, and the page's own policy lets no script run but the one below,
which it knows by its hash.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from datetime import datetime

from grpo_trainer.report import parts
from grpo_trainer.report.figures import main_plots, other_plots
from grpo_trainer.report.read import Run

STYLE = (
    """
:root { color-scheme: light dark; --back: #fff; --ink: #1c1e21; --line: #8884; --dim: #6b7280; --good: #1f7a3d;
  --bad: #b42318; --c0: #2f63c8; --c1: #c2410c; --c2: #15803d; --c3: #9333ea; --c4: #b45309; --c5: #0e7490;
  --c6: #be185d; --c7: #4d5564; --p: 34 150 80; --m: 210 70 40 }
@media (prefers-color-scheme: dark) { :root { --back: #14161a; --ink: #e6e8eb; --dim: #9aa3af; --good: #4ade80;
  --bad: #f87171; --c0: #7aa7ff; --c1: #fb923c; --c2: #4ade80; --c3: #c084fc; --c4: #fbbf24; --c5: #22d3ee;
  --c6: #f472b6; --c7: #a8b0bd; --p: 60 190 110; --m: 240 110 70 } }
* { box-sizing: border-box }
body { background: var(--back); color: var(--ink); font: 15px/1.45 system-ui, sans-serif; margin: 0 auto; padding: 1rem;
  max-width: 76rem }
h1 { font-size: 1.3rem; margin: 0; overflow-wrap: anywhere } h2 { font-size: 1.05rem; margin: 1.8rem 0 .6rem }
.dim, small { color: var(--dim) } .bad { color: var(--bad) } .good { color: var(--good) }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(9rem, 1fr)); gap: .6rem; margin: 1rem 0 }
.tile { border: 1px solid var(--line); border-radius: .5rem; padding: .5rem .7rem; min-width: 0 }
.tile b { display: block; font-size: 1.4rem; font-variant-numeric: tabular-nums }
.tile small { overflow-wrap: anywhere }
.figures { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(21rem, 100%), 1fr)); gap: .8rem;
  margin: .6rem 0 }
figure { border: 1px solid var(--line); border-radius: .5rem; margin: 0; padding: .5rem .6rem; min-width: 0;
  position: relative }
svg { display: block; width: 100%; height: auto; touch-action: pan-y } svg text { fill: var(--dim); font-size: 10.5px }
.grid { stroke: var(--line); stroke-width: .6 } .cursor { stroke: var(--dim); stroke-width: .8 }
polyline { fill: none; stroke-width: 1.6; stroke-linejoin: round } polyline.thin { stroke-width: 1; opacity: .3 }
polyline.d1 { stroke-dasharray: 5 3 } polyline.d2 { stroke-dasharray: 1.5 2.5 } polygon { opacity: .75 }
.legend { display: flex; flex-wrap: wrap; gap: .1rem .8rem; font-size: .8rem; color: var(--dim) }
.readout { position: absolute; top: .35rem; right: .6rem; background: var(--back); border: 1px solid var(--line);
  border-radius: .3rem; padding: .1rem .5rem; font-size: .8rem; font-variant-numeric: tabular-nums; max-width: 95% }
i { display: inline-block; width: .9rem; height: .2rem; margin: 0 .35rem .2rem 0; border-radius: 1px }
i[class^=a] { height: .6rem; margin-bottom: 0; opacity: .75 }
.scroll { overflow-x: auto }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums }
th, td { text-align: right; padding: .25rem .5rem; border-bottom: 1px solid var(--line); white-space: nowrap }
th:first-child, td:first-child { text-align: left }
pre { white-space: pre-wrap; overflow-wrap: anywhere; margin: .2rem 0 .6rem; font: 13px/1.5 ui-monospace, monospace }
.sample pre { border-left: 3px solid var(--line); padding: .1rem .7rem; max-height: 28rem; overflow-y: auto }
details { border: 1px solid var(--line); border-radius: .5rem; padding: .4rem .7rem; margin: .4rem 0 }
summary { cursor: pointer; overflow-wrap: anywhere } .u { color: var(--dim); font-style: italic }
.events { padding-left: 1.1rem; overflow-wrap: anywhere; max-height: 24rem; overflow-y: auto } li { margin: .2rem 0 }
"""
    + "".join(
        f"polyline.c{n} {{ stroke: var(--c{n}) }} polygon.a{n} {{ fill: var(--c{n}) }} "
        f"rect.a{n} {{ fill: var(--c{n}); opacity: .55 }} i.c{n}, i.a{n} {{ background: var(--c{n}) }}\n"
        for n in range(8)
    )
    + "".join(
        f".{sign}{n} {{ background: rgb(var(--{sign}) / {n * 0.18:.2f}); border-radius: 2px; color: var(--ink) }}\n"
        for sign in "pm"
        for n in range(1, 5)
    )
)

SCRIPT = """
"use strict";
const plots = JSON.parse(document.getElementById("data").textContent);
const show = (value, percent) => value === null ? "–" : percent ? (100 * value).toPrecision(3) + "%"
  : Math.abs(value) >= 1e4 ? Math.round(value).toLocaleString() : String(Number(value.toPrecision(4)));
for (const figure of document.querySelectorAll("figure[data-plot]")) {
  const plot = plots[figure.dataset.plot], svg = figure.querySelector("svg"), out = figure.querySelector(".readout");
  if (!svg) continue;
  const cursor = svg.querySelector(".cursor"), all = plot.lines.flatMap(line => line.xs);
  const low = Math.min(...all), high = Math.max(...all, low + 1e-9);
  const leave = () => { out.hidden = true; cursor.setAttribute("x1", -9); cursor.setAttribute("x2", -9); };
  svg.addEventListener("pointerleave", leave);
  svg.addEventListener("pointermove", event => {
    const box = svg.getBoundingClientRect(), place = (event.clientX - box.left) * 400 / box.width;
    const wanted = low + (place - 44) / (400 - 8 - 44) * (high - low);
    const nearest = xs => xs.reduce((best, x, i) => Math.abs(x - wanted) < Math.abs(xs[best] - wanted) ? i : best, 0);
    const first = plot.lines.find(line => line.xs.length);
    if (!first || place < 40) return leave();
    const x = first.xs[nearest(first.xs)];
    cursor.setAttribute("x1", 44 + (x - low) / (high - low) * 348);
    cursor.setAttribute("x2", 44 + (x - low) / (high - low) * 348);
    out.hidden = false;
    out.textContent = plot.x + " " + show(x, false) + ": " + plot.lines.map(line =>
      (plot.lines.length > 1 ? line.name + " " : "") + show(line.ys[nearest(line.xs)], plot.percent)).join(", ");
  });
}
document.body.dataset.ready = "yes";
"""


def page(runs: Sequence[Run], *, made: datetime, refresh_seconds: int = 0) -> str:
    """The whole report, of one run or of several beside each other.

    Args:
        made: when; it is said on the page.
        refresh_seconds: the browser loads the page again after so long; 0: it does not.
    """
    alone = len(runs) == 1
    plots, others = main_plots(runs), other_plots(runs)
    body = [f"<header><h1>{parts.text(' · '.join(run.name for run in runs))}</h1>"]
    state = "refreshed while the run goes on" if refresh_seconds else "a snapshot"
    body.append(f"<small>grpo report, {made:%Y-%m-%d %H:%M:%S}, {state}</small></header>")
    body.append(parts.tiles(runs[0]) if alone else parts.comparison(runs))
    body.append(_figures(plots, 0))
    if not alone:
        body.append(f"<h2>Options that differ</h2>{parts.differences(runs)}")
    if others:
        body.append(f"<details><summary>{len(others)} more metrics</summary>{_figures(others, len(plots))}</details>")
    for run in runs:
        of_it = "" if alone else f" of {parts.text(run.name)}"
        if alone or run.timeline:
            body.append(f"<h2>Timeline{of_it}</h2>{parts.timeline(run)}")
        if alone or run.samples:
            body.append(f"<h2>Samples{of_it}</h2>{parts.samples(run.samples)}")
        body.append(f"<h2>Events{of_it}</h2>{parts.events(run)}")
        body.append(f"<h2>Configuration{of_it}</h2>{parts.configuration(run)}")
    data = f'<script type="application/json" id="data">{parts.plot_data([*plots, *others])}</script>'
    return _document(runs, "".join(body) + data, refresh_seconds)


def _figures(plots: Sequence[parts.Plot], first: int) -> str:
    return f'<div class="figures">{"".join(parts.figure(p, first + n) for n, p in enumerate(plots))}</div>'


def _document(runs: Sequence[Run], body: str, refresh_seconds: int) -> str:
    digest = base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; img-src data:"
    refresh = f'<meta http-equiv="refresh" content="{refresh_seconds}">' if refresh_seconds else ""
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">{refresh}'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><link rel="icon" href="data:,">'
        f"<title>{parts.text(runs[0].name)}: grpo report</title><style>{STYLE}</style></head>"
        f"<body>{body}<script>{SCRIPT}</script></body></html>\n"
    )
