"""`--benchmark`: where a run's time went, from its own metrics.jsonl."""

from __future__ import annotations

import json
from pathlib import Path

from rich.console import Console
from rich.table import Table

PHASES = {
    "waiting for rollouts": "train/data_fetch_time",
    "forward and backward": "train/forward_backward_time",
    "optimizer": "train/optimizer_time",
    "publishing weights": "train/sync_time",
}


def time_split(path: Path) -> dict[str, float]:
    """Seconds by phase over all steps of a metrics.jsonl; what is in no phase is "other"."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    split = {name: sum(row.get(key) or 0.0 for row in rows) for name, key in PHASES.items()}
    total = sum(row.get("train/seconds") or 0.0 for row in rows)
    return {**split, "other (logging, checkpoints)": max(0.0, total - sum(split.values()))}


def print_time_split(path: Path, console: Console) -> None:
    """A table of seconds and shares."""
    split = time_split(path)
    total = sum(split.values()) or 1.0
    table = Table(title="where the time went")
    table.add_column("phase")
    table.add_column("seconds", justify="right")
    table.add_column("share", justify="right")
    for name, seconds in split.items():
        table.add_row(name, f"{seconds:.1f}", f"{seconds / total:.0%}")
    console.print(table)
