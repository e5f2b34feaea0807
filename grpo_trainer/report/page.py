"""`grpo report`: a run, or several side by side, on one page that asks nobody else for anything; or as JSON."""

from __future__ import annotations

import functools
import json
import math
import statistics
import time
from collections.abc import Sequence
from datetime import datetime
from hashlib import sha256
from pathlib import Path
from typing import Any

import jinja2
import tomli_w

from grpo_common.pages.document import document, plotting
from grpo_common.text import BIDI
from grpo_trainer.files import replace_file
from grpo_trainer.metrics.health import duration, learnt, outcome
from grpo_trainer.metrics.rows import ENDS
from grpo_trainer.report.figures import page_data
from grpo_trainer.report.read import Run, read_run

REPORT_FILE = "report.html"
MOST_OF_NAMES = 50
"""Characters of the runs' names in a comparison's file name; a file name may have 255 bytes."""
WATCH_SECONDS = 5
MOST_EVALUATIONS = 4
"""Tiles of them."""
HERE = Path(__file__).parent
SCRIPTS = ("controls.js", "samples.js")


def report_path(folders: Sequence[Path], output: Path | None) -> Path:
    """Where the page goes: into the run's folder, or the first one's, unless said otherwise.

    A comparison is named after the runs, so that each has its own file; long names end with a digest of them all.
    """
    names = "-".join(folder.resolve().name for folder in folders)
    if len(names) > MOST_OF_NAMES:
        names = f"{names[:MOST_OF_NAMES]}-{sha256(names.encode()).hexdigest()[:8]}"
    return output or folders[0] / (REPORT_FILE if len(folders) == 1 else f"comparison-{names}.html")


def write_report(folders: Sequence[Path], path: Path, *, refresh_seconds: int = 0) -> bool:
    """Write the page, whole or not at all; return whether all runs took their last step. Errors: see `read_run`."""
    runs = [read_run(folder, may_be_empty=bool(refresh_seconds)) for folder in folders]
    done = all(run.is_done for run in runs)
    html = page(runs, made=datetime.now(), refresh_seconds=0 if done else refresh_seconds)
    replace_file(path, html.encode(errors="replace"))  # text of models may hold half characters
    return done


def watch(folders: Sequence[Path], path: Path) -> None:
    """Write the page every few seconds until the runs are done, or Ctrl-C; the last one does not reload itself."""
    try:
        while not write_report(folders, path, refresh_seconds=WATCH_SECONDS):
            time.sleep(WATCH_SECONDS)
    except KeyboardInterrupt:
        write_report(folders, path)


def as_json(folders: Sequence[Path]) -> str:
    """Return figures and verdict of each run as a JSON list."""
    return json.dumps([summary(read_run(folder)) for folder in folders], indent=1)


def summary(run: Run) -> dict[str, Any]:
    """Return the figures that say how a run goes; None where nothing was measured.

    `verdict` is None for a run of too few steps. `unhealthy` has a row for each figure that left its usual range, in
    the order in which they did; `last` has the last value of each figure.
    """
    found = outcome(run.rows)
    rewards, speeds = run.numbers("reward/mean"), run.numbers("train/tokens_per_second")
    published = run.rows[-1].get("publish/version") if run.rows else None
    return {
        "name": run.name,
        "folder": str(run.folder),
        "steps": run.steps,
        "total_steps": run.total_steps,
        "done": run.is_done,
        "verdict": found.verdict if found else None,
        "says": str(found) if found else learnt(run.rows),
        "unhealthy": [
            {
                "figure": own[0].sign.check.key,
                "says": str(own[0].sign),
                "first_step": run.rows[own[0].first]["step"],
                "steps": sum(each.last + 1 - each.first for each in own),
            }
            for own in run.unhealthy.values()
        ],
        "reward": {
            "first": statistics.fmean(rewards[:ENDS]) if rewards else None,
            "last": statistics.fmean(rewards[-ENDS:]) if rewards else None,
            **_best(run, "reward/mean"),
        },
        "evaluations": _evaluations(run),
        "tokens_per_second": statistics.median(speeds) if speeds else None,
        "seconds": sum(run.numbers("train/seconds")),
        "version": None if published is None else int(published),
        "checkpoints": [*run.checkpoints],
        "last": {key: series.values[-1] for key, series in run.series.items()},
    }


def _evaluations(run: Run) -> dict[str, dict[str, Any]]:
    """Each environment's main figure: the one with a confidence interval, or its first."""
    own: dict[str, list[str]] = {}
    for key in sorted(key for key in run.series if key.startswith("eval/") and run.numbers(key)):
        if not key.endswith(("_low", "_high", "/samples")):
            own.setdefault(key.split("/")[1], []).append(key)
    found: dict[str, dict[str, Any]] = {}
    for keys in own.values():
        key = next((key for key in keys if f"{key}_low" in run.series), keys[0])
        pairs = zip(run.series[key].values, run.series[key].steps, strict=True)
        last, step = [(value, step) for value, step in pairs if value is not None][-1]
        found[key.removeprefix("eval/")] = {"last": last, "step": step, **_best(run, key)}
    return found


def _best(run: Run, key: str) -> dict[str, float | None]:
    """The highest value, and its first step."""
    series = run.series.get(key)
    pairs = [] if series is None else zip(series.values, series.steps, strict=True)
    value, step = max(((value, -step) for value, step in pairs if value is not None), default=(None, None))
    return {"best": value, "best_step": None if step is None else -step}


def _tiles(run: Run, figures: dict[str, Any]) -> list[tuple[str, str, str]]:
    """Name, value and note of the figures that say at a glance how it goes."""
    reward, seconds = figures["reward"], figures["seconds"]
    found = [("step", str(run.steps), f"of {run.total_steps}" if run.total_steps else "")]
    if reward["last"] is not None:
        note = f"first {ENDS}: {reward['first']:.3f}; best: {reward['best']:.3f} (step {reward['best_step']:g})"
        found.append((f"reward, last {ENDS} steps", f"{reward['last']:.3f}", note))
    for name, each in [*figures["evaluations"].items()][:MOST_EVALUATIONS]:
        note = f"step {each['step']:g}; best: {each['best']:.3g} (step {each['best_step']:g})"
        found.append((f"evaluation, {name}", f"{each['last']:.3g}", note))
    if figures["tokens_per_second"] is not None:
        found.append(("tokens/s", f"{figures['tokens_per_second']:,.0f}", "median of the steps"))
    found.append(("training", duration(seconds), f"{seconds / max(len(run.rows), 1):.2f} s a step"))
    if figures["version"] is not None:
        found.append(("version", f"v{figures['version']}", "published last"))
    found.append(("checkpoints", str(len(run.checkpoints)), run.checkpoints[-1] if run.checkpoints else "none"))
    return found


def _comparison(figures: Sequence[dict[str, Any]]) -> list[list[str]]:
    """A head, and a row for each run."""
    rows = [["run", "steps", f"reward, first {ENDS}", f"last {ENDS}", "best", "tokens/s", "training"]]
    for each in figures:
        reward = each["reward"]
        numbers = [math.nan if reward[key] is None else reward[key] for key in ("first", "last", "best")]
        speed = math.nan if each["tokens_per_second"] is None else each["tokens_per_second"]
        cells = [str(each["steps"]), *(f"{number:.3f}" for number in numbers), f"{speed:,.0f}"]
        rows.append([each["name"], *cells, duration(each["seconds"])])
    return rows


def _differences(runs: Sequence[Run]) -> list[list[str]]:
    """A head, and a row for each option of trainer and environments in which the runs differ."""
    settings = [run.settings for run in runs]
    keys = sorted({key for each in settings for key in each})
    different = [key for key in keys if len({json.dumps(each.get(key), default=str) for each in settings}) > 1]
    rows = [[key, *(str(each.get(key, "–")) for each in settings)] for key in different]
    return [["option", *(run.name for run in runs)], *rows]


def _banner(number: int, run: Run, figures: dict[str, Any]) -> dict[str, Any] | None:
    """Whether the run learnt, and a line for each figure that left its usual range, with the first thing to try."""
    if not run.rows:
        return None
    tone = {"it learnt": "good", "it got worse": "bad", "not healthy": "bad"}.get(figures["verdict"], "")
    edge, said = "warn" if run.unhealthy and tone != "bad" else tone, figures["says"]
    unhealthy = [{**each, "of": len(run.rows)} for each in figures["unhealthy"]]
    line = f"{said[0].upper()}{said[1:]}."
    return {"number": number, "name": run.name, "tone": tone, "edge": edge, "line": line, "unhealthy": unhealthy}


@functools.cache
def _template() -> jinja2.Template:
    def upright(value: Any) -> Any:
        """Show characters that turn the direction of text as escapes: text of others is on the page."""
        return value if hasattr(value, "__html__") else str(value).translate(BIDI)

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(HERE), autoescape=True, finalize=upright, undefined=jinja2.StrictUndefined
    )
    environment.filters["toml"] = tomli_w.dumps
    return environment.get_template("page.html.j2")


def page(runs: Sequence[Run], *, made: datetime, refresh_seconds: int = 0) -> str:
    """Return the whole report: plain HTML, and the data from which the page's scripts draw plots and samples.

    The browser loads the page again after `refresh_seconds`, unless they are 0.
    """
    figures = [summary(run) for run in runs]
    body = _template().render(
        runs=runs,
        made=f"{made:%Y-%m-%d %H:%M:%S}",
        state="refreshed during the run" if refresh_seconds else "a snapshot",
        tiles=_tiles(runs[0], figures[0]),
        comparison=_comparison(figures),
        banners=[_banner(number, run, each) for number, (run, each) in enumerate(zip(runs, figures, strict=True))],
        differences=_differences(runs),
    )
    style, scripts = plotting()
    return document(
        f"{runs[0].name}: grpo report",
        body,
        style=style,
        scripts=[*scripts, *((HERE / "static" / name).read_text() for name in SCRIPTS)],
        data=page_data(runs),
        refresh_seconds=refresh_seconds,
    )
