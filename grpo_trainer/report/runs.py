"""`grpo runs`: the runs in a folder, each by what its own folder says."""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from grpo_common.formats import FormatError
from grpo_common.locks import is_held
from grpo_common.redaction import redacted_text
from grpo_trainer.errors import ConfigError
from grpo_trainer.files import LOCK_FILE, METRICS_FILE
from grpo_trainer.metrics.rows import ENDS, last_rows
from grpo_trainer.report.read import CONFIG_FILE, final_step, is_done, read_settings

DEPTH = 2
"""How many folders down runs are looked for: `runs/sums`, `runs/monday/sums`."""

MODEL_WIDTH = 26
"""A longer name of a model is shortened in the table, which should fit 80 columns."""


@dataclass(frozen=True)
class Listed:
    """A run as one line."""

    folder: str
    mode: str | None
    model: str | None
    steps: int
    total_steps: int | None
    """What it set out to do; None: not known."""
    reward: float | None
    """Mean of the last five steps; None: no step has one."""
    state: str
    """running, done (all steps are taken) or stopped; unknown: another user's, which may be running; damaged: its
    options or some of its last rows cannot be read; newer: a newer version of this program wrote it."""
    changed: float
    """When its last step was written, Unix seconds."""


def list_runs(folder: Path) -> list[Listed]:
    """Return all runs in a folder, itself included, the last changed first.

    Raises:
        ConfigError: there is no such folder.
    """
    if not folder.is_dir():
        raise ConfigError(field="FOLDER", got=folder, wanted="a folder of runs")
    return sorted((_listed(each) for each in _run_folders(folder)), key=lambda run: -run.changed)


def _run_folders(folder: Path, depth: int = DEPTH) -> Iterator[Path]:
    if (folder / METRICS_FILE).exists() or (folder / CONFIG_FILE).exists():
        yield folder
    elif depth:
        for path in sorted(folder.iterdir()):
            if path.is_dir() and not path.is_symlink() and os.access(path, os.R_OK | os.X_OK):
                yield from _run_folders(path, depth - 1)


def _listed(folder: Path) -> Listed:
    settings: dict[str, Any] = {}
    checkpoints, is_damaged = folder / "checkpoints", False
    try:
        settings = read_settings(folder)
    except (ValueError, RecursionError):
        is_damaged = True
    try:
        rows, unreadable = last_rows(folder / METRICS_FILE)
        last = final_step(checkpoints)
    except FormatError:
        return Listed(str(folder), None, None, 0, None, None, "newer", folder.stat().st_mtime)
    steps = rows[-1]["step"] if rows else 0
    mode, model, total = (settings.get(key) for key in ("weight_bridge_mode", "model_name", "training_steps"))
    total = total if isinstance(total, int) else None
    rewards = [row["reward/mean"] for row in rows[-ENDS:] if row.get("reward/mean") is not None]
    done = is_done(steps, total, last)
    try:
        running = is_held(folder / LOCK_FILE) or is_held(checkpoints / LOCK_FILE)
        state = "running" if running else "done" if done else "stopped"
    except PermissionError:
        state = "done" if done else "unknown"
    return Listed(
        folder=str(folder),
        mode=str(mode or "none") if settings else None,
        model=None if model is None else redacted_text(str(model)),
        steps=steps,
        total_steps=total,
        reward=round(statistics.fmean(rewards), 4) if rewards else None,
        state="damaged" if (is_damaged or unreadable) and state != "running" else state,
        changed=(folder / METRICS_FILE if rows else folder).stat().st_mtime,
    )


def as_json(runs: Sequence[Listed]) -> str:
    return json.dumps([asdict(run) for run in runs], indent=1)


def print_runs(runs: Sequence[Listed], folder: Path, console: Console) -> None:
    """A table; runs are named by their place in the folder."""
    table = Table(box=None, pad_edge=False)
    for name in ("run", "mode", "model", "steps", "reward", "state"):
        justify = "right" if name in ("steps", "reward") else "left"
        table.add_column(name, justify=justify, overflow="fold", no_wrap=name not in ("run", "model"))
    for run in runs:
        model = run.model or "–"
        model = model if len(model) <= MODEL_WIDTH else f"…/{Path(model).name}"
        steps = f"{run.steps}/{run.total_steps}" if run.total_steps else str(run.steps)
        reward = "–" if run.reward is None else f"{run.reward:.3f}"
        table.add_row(os.path.relpath(run.folder, folder), run.mode or "–", model, steps, reward, run.state)
    console.print(table if runs else f"no run in {folder}", markup=False, highlight=False)
