"""Parts of the page that are plain HTML: tiles, tables, configuration, events. All text is escaped here."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable, Sequence
from html import escape

import tomli_w

from grpo_common.text import BIDI
from grpo_trainer.metrics.health import Episode, learnt, outcome
from grpo_trainer.metrics.remaining import duration
from grpo_trainer.metrics.rows import ENDS
from grpo_trainer.report.events import Event
from grpo_trainer.report.read import Run
from grpo_trainer.report.timeline import lanes, last_steps, sentence

MOST_EVALUATIONS = 4
"""Tiles of them."""


def text(value: object) -> str:
    return escape(str(value).translate(BIDI), quote=True)


def tiles(run: Run) -> str:
    """The figures that say at a glance how it goes."""
    speeds = run.numbers("train/tokens_per_second")
    seconds = sum(run.numbers("train/seconds"))
    found = [("step", str(run.steps), f"of {run.total_steps}" if run.total_steps else "")]
    if rewards := run.numbers("reward/mean"):
        first, last = statistics.fmean(rewards[:ENDS]), statistics.fmean(rewards[-ENDS:])
        best, step = _best(run, "reward/mean")
        found.append(
            (f"reward, last {ENDS} steps", f"{last:.3f}", f"first {ENDS}: {first:.3f}; best: {best:.3f} (step {step})")
        )
    found += _evaluation_tiles(run)
    if speeds:
        found.append(("tokens/s", f"{statistics.median(speeds):,.0f}", "median of the steps"))
    found.append(("training", duration(seconds), f"{seconds / max(len(run.rows), 1):.2f} s a step"))
    if run.rows and (published := run.rows[-1].get("publish/version")) is not None:
        found.append(("version", f"v{published:.0f}", "published last"))
    found.append(("checkpoints", str(len(run.checkpoints)), run.checkpoints[-1] if run.checkpoints else "none"))
    return f'<div class="tiles">{"".join(_tile(*each) for each in found)}</div>'


def _evaluation_tiles(run: Run) -> list[tuple[str, str, str]]:
    """The last and the best of each environment's main figure: the one with a confidence interval, or its first."""
    own: dict[str, list[str]] = {}
    for key in sorted(key for key in run.series if key.startswith("eval/") and run.numbers(key)):
        if not key.endswith(("_low", "_high", "/samples")):
            own.setdefault(key.split("/")[1], []).append(key)
    found = []
    for keys in list(own.values())[:MOST_EVALUATIONS]:
        key = next((key for key in keys if f"{key}_low" in run.series), keys[0])
        best, step = _best(run, key)
        last = next(value for value in reversed(run.series[key].values) if value is not None)
        note = f"step {run.series[key].steps[-1]:g}; best: {best:.3g} (step {step})"
        found.append((f"evaluation, {key.removeprefix('eval/')}", f"{last:.3g}", note))
    return found


def _best(run: Run, key: str) -> tuple[float, str]:
    """The highest value, and its step."""
    series = run.series[key]
    pairs = [(value, -step) for value, step in zip(series.values, series.steps, strict=True) if value is not None]
    value, step = max(pairs)
    return value, f"{-step:g}"


def _tile(name: str, value: str, note: str) -> str:
    """`note` may be empty; its line is there all the same, so that tiles are of one height."""
    below = text(note) or "&nbsp;"
    return f'<div class="tile"><small>{text(name)}</small><b>{text(value)}</b><small>{below}</small></div>'


def banner(run: Run, number: int | None = None) -> str:
    """Whether the run learnt, and a line for each figure that left its usual range, with the first thing to try.

    Args:
        number: of the run on the page; None: it is the only one.
    """
    if not run.rows:
        return ""
    found = outcome(run.rows)
    tone = {"it learnt": "good", "it got worse": "bad", "not healthy": "bad"}.get(found.verdict, "") if found else ""
    edge = "warn" if run.unhealthy and tone != "bad" else tone
    name = "" if number is None else f'<i class="c{number % 8}"></i>{text(run.name)}: '
    line = learnt(run.rows)
    lines = "".join(f"<li>{_unhealthy(run, own)}</li>" for own in run.unhealthy.values())
    return (
        f'<section class="banner {edge}"><p>{name}<b class="{tone}">{text(f"{line[0].upper()}{line[1:]}.")}</b></p>'
        f"{f'<ul>{lines}</ul>' if lines else ''}</section>"
    )


def _unhealthy(run: Run, own: Sequence[Episode]) -> str:
    steps = sum(each.last + 1 - each.first for each in own)
    return f"<b>Step {run.rows[own[0].first]['step']}</b>, {steps} of {len(run.rows)} steps: {text(own[0].sign)}."


# several runs, configuration, events -----------------------------------------------------------------------


def comparison(runs: Sequence[Run]) -> str:
    """A row for each run, with a box that shows or hides it in every plot."""
    rows = []
    for number, run in enumerate(runs):
        rewards = run.numbers("reward/mean") or [math.nan]
        speeds = run.numbers("train/tokens_per_second") or [math.nan]
        cells = [str(run.steps), *(f"{statistics.fmean(end):.3f}" for end in (rewards[:ENDS], rewards[-ENDS:]))]
        cells += [f"{max(rewards):.3f}", f"{statistics.median(speeds):,.0f}"]
        cells.append(duration(sum(run.numbers("train/seconds"))))
        mark = f'<label><input type="checkbox" data-run="{number}" checked><i class="c{number % 8}"></i>'
        rows.append([f"{mark}{text(run.name)}</label>", *map(text, cells)])
    return table(["run", "steps", "reward, first 5", "last 5", "best", "tokens/s", "training"], rows)


def timeline(run: Run) -> str:
    """What the run waits for most, and the last steps stage by stage."""
    window = last_steps(run.timeline)
    if window is None:
        return '<p class="dim">None was recorded: <code>--trace</code> does.</p>'
    return f"<p>{text(sentence(run.timeline))} The last steps:</p>{lanes(run.timeline, window)}"


def differences(runs: Sequence[Run]) -> str:
    """The options of trainer and environments in which they differ."""
    settings = [run.settings for run in runs]
    keys = sorted({key for each in settings for key in each})
    rows = [
        [text(key), *(text(each.get(key, "–")) for each in settings)]
        for key in keys
        if len({json.dumps(each.get(key), default=str) for each in settings}) > 1
    ]
    return table(["option", *(run.name for run in runs)], rows) if rows else '<p class="dim">None.</p>'


def unreadable(run: Run) -> str:
    """What of the run's folder is left out."""
    lines = "".join(f"<li>{text(line)}</li>" for line in run.unreadable)
    return (
        f'<section class="banner warn"><p>Parts of {text(run.folder)} are damaged.</p><ul>{lines}</ul></section>'
        if lines
        else ""
    )


def configuration(run: Run) -> str:
    found = [
        f"<details><summary>{text(name)}</summary><pre>{text(tomli_w.dumps(tables))}</pre></details>"
        for name, tables in run.configs.items()
    ]
    return "".join(found) or '<p class="dim">No config folder: the trainer was started by hand.</p>'


def events(run: Run) -> str:
    """What was out of the ordinary, the newest last; what servers say while they start and end is folded."""
    loud = [event for event in run.events if not event.routine]
    quiet = [event for event in run.events if event.routine]
    found = _events(loud) if loud else '<p class="dim">None.</p>'
    if quiet:
        summary = f"{len(quiet)} warnings while servers started and ended"
        found += f"<details><summary>{summary}</summary>{_events(quiet)}</details>"
    return found


def _events(found: Iterable[Event]) -> str:
    lines = (f"<li><small>{text(event.source)}</small> {text(event.text)}</li>" for event in found)
    return f'<ul class="events">{"".join(lines)}</ul>'


def table(head: Iterable[str], rows: Iterable[Sequence[str]]) -> str:
    """Cells are HTML already; the head is text."""
    body = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in rows)
    cells = "".join(f"<th>{text(cell)}</th>" for cell in head)
    return f'<div class="scroll"><table><thead><tr>{cells}</tr></thead><tbody>{body}</tbody></table></div>'
