"""`--benchmark`: where a run's time went, from its own metrics.jsonl."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.table import Table

from grpo_trainer.metrics.rows import read_rows

PHASES = {
    "waiting for rollouts": "train/data_fetch_time",
    "forward and backward": "train/forward_backward_time",
    "optimizer": "train/optimizer_time",
    "publishing weights": "train/sync_time",
    "copying checkpoints": "train/save_time",
}
"""What training does or waits for, one after the other."""

MEANWHILE = {
    "fetching the next batch": "rollout/fetch_time",
    "making it ready": "rollout/prepare_time",
    "writing checkpoints": "checkpoint/write_time",
}
"""What threads do during training. Fetching ends when rollouts are there; training waited for a part of that time, and
the rest overlapped with a step."""


def time_split(path: Path) -> tuple[dict[str, float], dict[str, float]]:
    """Seconds over all steps of a metrics.jsonl: by phase, with "other" for the rest, and of threads meanwhile."""
    rows = read_rows(path)
    seconds = {
        name: sum(row.get(key) or 0.0 for row in rows)
        for name, key in (*PHASES.items(), *MEANWHILE.items(), ("other", "train/seconds"))
    }
    split = {name: seconds[name] for name in PHASES}
    other = max(0.0, seconds["other"] - sum(split.values()))
    return {**split, "other": other}, {name: seconds[name] for name in MEANWHILE}


def print_time_split(path: Path, console: Console) -> None:
    """A table of seconds and shares, and below it what went on meanwhile."""
    split, meanwhile = time_split(path)
    total = sum(split.values()) or 1.0
    table = Table("phase", title="where the time went")
    table.add_column("seconds", justify="right")
    table.add_column("share", justify="right")
    for name, seconds in [*split.items(), *((f"meanwhile: {name}", each) for name, each in meanwhile.items())]:
        table.add_row(name, f"{seconds:.1f}", f"{seconds / total:.0%}", end_section=name == "other")
    console.print(table)
