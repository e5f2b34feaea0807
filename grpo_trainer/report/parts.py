"""Parts of the page: tiles, figures, samples, configuration, events. All text is escaped here."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from grpo_trainer.metrics.remaining import duration
from grpo_trainer.report.plots import Line, Plot, svg, thinned
from grpo_trainer.report.read import Run
from grpo_trainer.report.timeline import lanes, last_steps, sentence

ENDS = 5
"""The reward at start and at end is the mean of this many steps, as in `metrics.summary`."""
FIRST_SAMPLES, LAST_SAMPLES = 6, 40
STRENGTHS = 4
STRONGEST = 0.7
"""A ratio of e to this, or one over it, has the strongest colour."""


def text(value: object) -> str:
    return escape(str(value), quote=True)


def tiles(run: Run) -> str:
    """The figures that say at a glance how it goes."""
    rewards = [value for value in run.values("reward/mean") if value is not None]
    speeds = [value for value in run.values("train/tokens_per_second") if value is not None]
    seconds = sum(row.get("train/seconds") or 0.0 for row in run.rows)
    found = [("step", str(run.steps), f"of {run.total_steps}" if run.total_steps else "")]
    if rewards:
        start, end = statistics.fmean(rewards[:ENDS]), statistics.fmean(rewards[-ENDS:])
        found.append(("reward", f"{end:.3f}", f"from {start:.3f}, best {max(rewards):.3f}"))
    if speeds:
        found.append(("tokens/s", f"{statistics.median(speeds):,.0f}", "median of the steps"))
    found.append(("training", duration(seconds), f"{seconds / max(len(run.rows), 1):.2f} s a step"))
    if run.rows and "publish/version" in run.rows[-1]:
        published = run.rows[-1]["publish/version"]
        found.append(("version", f"v{published:.0f}", "published last"))
    found.append(("checkpoints", str(len(run.checkpoints)), run.checkpoints[-1] if run.checkpoints else "none"))
    return f'<div class="tiles">{"".join(_tile(*each) for each in found)}</div>'


def _tile(name: str, value: str, note: str) -> str:
    """`note` may be empty; its line is there all the same, so that tiles are of one height."""
    below = text(note) or "&nbsp;"
    return f'<div class="tile"><small>{text(name)}</small><b>{text(value)}</b><small>{below}</small></div>'


def figure(plot: Plot, number: int) -> str:
    """A plot with its title, note and legend; the script shows values under the pointer."""
    kind = "a" if plot.stacked else "c"
    marks = "".join(
        f'<span><i class="{kind}{line.colour % 8} d{line.dash % 3}"></i>{text(line.name)}</span>'
        for line in plot.lines
        if len(plot.lines) > 1
    )
    legend = f'<div class="legend">{marks}</div>' if marks else ""
    caption = f"<figcaption><b>{text(plot.title)}</b> <small>{text(plot.note)}</small></figcaption>"
    readout = '<div class="readout" hidden></div>'
    return f'<figure data-plot="{number}">{caption}{svg(plot)}{readout}{legend}</figure>'


def plot_data(plots: Sequence[Plot]) -> str:
    """The numbers for the script: JSON that can stand in a script element."""
    found = [
        {"x": plot.x_name, "percent": plot.percent, "lines": [_line_data(thinned(line)) for line in plot.lines]}
        for plot in plots
    ]
    return json.dumps(found, separators=(",", ":")).replace("<", "\\u003c")


def _line_data(line: Line) -> dict[str, Any]:
    def rounded(value: float | None) -> float | None:
        return None if value is None or not math.isfinite(value) else float(f"{value:.5g}")

    return {"name": line.name, "xs": [rounded(x) for x in line.xs], "ys": [rounded(y) for y in line.ys]}


# samples ---------------------------------------------------------------------------------------------------


def samples(rows: Sequence[Mapping[str, Any]]) -> str:
    """The newest, and the first for comparison."""
    if not rows:
        return '<p class="dim">None were logged: <code>--log-samples 4</code> writes four of each step.</p>'
    chosen = [*rows[:FIRST_SAMPLES], *rows[max(FIRST_SAMPLES, len(rows) - LAST_SAMPLES) :]]
    legend = (
        '<p class="dim">Colour: what the policy gives a token over what it was sampled with; '
        f"{_token('half', 0.5)} {_token('as likely', 1.0)} {_token('twice', 2.0)}. "
        '<span class="u">Not trained.</span></p>'
    )
    return legend + "".join(_sample(row) for row in reversed(chosen))


def _sample(row: Mapping[str, Any]) -> str:
    version = "" if row["version"] is None else f", v{row['version']}"
    environment = "" if row["environment"] is None else f", environment {row['environment']}"
    pieces = zip(row["pieces"], row["ratios"], row["trained"], strict=True)
    answer = "".join(_token(piece, ratio, trained=trained) for piece, ratio, trained in pieces)
    cut = f'<span class="dim"> … {row["cut"]} more tokens</span>' if row["cut"] else ""
    good = "good" if row["advantage"] > 0 else "bad" if row["advantage"] < 0 else "dim"
    begin = text(f"{row['prompt'][-40:]} → {''.join(row['pieces'])[:60]}".replace("\n", " "))
    return (
        f"<details><summary>Step {row['step']}: reward <b>{row['reward']:.3g}</b>, advantage "
        f'<b class="{good}">{row["advantage"]:+.2f}</b> <small>group {row["group"]}{version}{environment}</small> '
        f'<span class="dim">{begin}</span></summary>'
        f'<div class="sample"><pre class="dim">{text(row["prompt"])}</pre><pre>{answer}{cut}</pre></div></details>'
    )


def _token(piece: str, ratio: float | None, *, trained: bool = True) -> str:
    if not trained:
        return f'<span class="u">{text(piece)}</span>'
    if ratio is None:
        return f"<span>{text(piece)}</span>"
    return f'<span class="{strength(ratio)}" title="ratio {ratio:.3g}">{text(piece)}</span>'


def strength(ratio: float) -> str:
    """A class of the style: p1 to p4 for likelier, m1 to m4 for less likely, none for about the same."""
    size = abs(math.log(max(ratio, 1e-9))) / STRONGEST
    step = min(STRENGTHS, round(size * STRENGTHS))
    return "" if not step else f"{'p' if ratio > 1 else 'm'}{step}"


# several runs, configuration, events -----------------------------------------------------------------------


def comparison(runs: Sequence[Run]) -> str:
    """A row for each run."""
    rows = []
    for number, run in enumerate(runs):
        rewards = [value for value in run.values("reward/mean") if value is not None] or [math.nan]
        speeds = [value for value in run.values("train/tokens_per_second") if value is not None] or [math.nan]
        seconds = sum(row.get("train/seconds") or 0.0 for row in run.rows)
        cells = [str(run.steps), *(f"{statistics.fmean(end):.3f}" for end in (rewards[:ENDS], rewards[-ENDS:]))]
        cells += [f"{max(rewards):.3f}", f"{statistics.median(speeds):,.0f}", duration(seconds)]
        mark = f'<i class="c{number % 8}"></i>{text(run.name)}'
        rows.append([mark, *map(text, cells)])
    return table(["run", "steps", "reward, first 5", "last 5", "best", "tokens/s", "training"], rows)


def timeline(run: Run) -> str:
    """What the run waits for most, and the last steps stage by stage."""
    window = last_steps(run.timeline)
    if window is None:
        return '<p class="dim">None was recorded: <code>--trace</code> does.</p>'
    return f"<p>{text(sentence(run.timeline))} The last steps:</p>{lanes(run.timeline, window)}"


def differences(runs: Sequence[Run]) -> str:
    """The trainer's options in which they differ."""
    settings = [run.settings for run in runs]
    keys = sorted({key for each in settings for key in each} - {"save_path", "log_dir", "atropos_url", "vllm_port"})
    rows = [
        [text(key), *(text(each.get(key, "–")) for each in settings)]
        for key in keys
        if len({json.dumps(each.get(key), default=str) for each in settings}) > 1
    ]
    return table(["option", *(run.name for run in runs)], rows) if rows else '<p class="dim">None.</p>'


def configuration(run: Run) -> str:
    found = [
        f"<details><summary>{text(name)}</summary><pre>{text(toml)}</pre></details>"
        for name, toml in run.configs.items()
    ]
    return "".join(found) or '<p class="dim">No config folder: the trainer was started by hand.</p>'


def events(run: Run) -> str:
    """What was out of the ordinary; the newest last."""
    found = [f"<li><small>{text(event.source)}</small> {text(event.text)}</li>" for event in run.events]
    return f'<ul class="events">{"".join(found)}</ul>' if found else '<p class="dim">None.</p>'


def table(head: Iterable[str], rows: Iterable[Sequence[str]]) -> str:
    """Cells are HTML already; the head is text."""
    body = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in rows)
    cells = "".join(f"<th>{text(cell)}</th>" for cell in head)
    return f'<div class="scroll"><table><thead><tr>{cells}</tr></thead><tbody>{body}</tbody></table></div>'
