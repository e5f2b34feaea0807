"""Summary of a run as a table and one JSON object: `python -m grpo_trainer.metrics.summary RUN_DIR`."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from grpo_trainer.errors import ConfigError

ENDS = 5
"""The reward at start and at end is the mean of this many steps."""


@dataclass(frozen=True)
class Summary:
    """Outcome of a run; `seconds` is the time from the first request of a batch to the end of the last step."""

    reward_start: float
    reward_end: float
    steps: int
    seconds: float
    run_dir: str

    @property
    def rise(self) -> float:
        return self.reward_end - self.reward_start


def summarise(run_dir: Path) -> Summary:
    """Read a run's metrics.jsonl.

    Raises:
        ConfigError: there is none, or it has no step.
    """
    path = run_dir / "metrics.jsonl"
    if not path.exists() or not (lines := path.read_text().splitlines()):
        raise ConfigError(field=str(path), got="no step", wanted="the file of a run that has trained")
    rows = [json.loads(line) for line in lines]
    rewards = [row["reward/mean"] for row in rows]
    first, last = rewards[:ENDS], rewards[-ENDS:]
    return Summary(
        reward_start=round(sum(first) / len(first), 4),
        reward_end=round(sum(last) / len(last), 4),
        steps=rows[-1]["step"],
        seconds=round(sum(row["train/seconds"] for row in rows), 1),
        run_dir=str(run_dir),
    )


def print_summary(summary: Summary, console: Console) -> None:
    """Print the table."""
    table = Table(title="GRPO run", show_header=False)
    table.add_row("mean reward, first 5 steps", f"{summary.reward_start:.3f}")
    table.add_row("mean reward, last 5 steps", f"{summary.reward_end:.3f}")
    table.add_row("steps", str(summary.steps))
    table.add_row("seconds of training", f"{summary.seconds:.0f}")
    table.add_row("run folder", summary.run_dir)
    console.print(table)


def main(
    run_dir: Annotated[Path, typer.Argument(help="Folder of a run.")],
    min_rise: Annotated[float, typer.Option(help="Exit with 1 if the reward rose by less.")] = float("-inf"),
) -> None:
    """Print the summary of a run; the last line is a JSON object."""
    try:
        summary = summarise(run_dir)
    except ConfigError as error:
        sys.exit(f"grpo: {error}")
    print_summary(summary, Console())
    print(json.dumps(asdict(summary)))
    if summary.rise < min_rise:
        sys.exit(
            f"grpo: the reward rose by {summary.rise:.3f}, wanted at least {min_rise}; see {run_dir}/metrics.jsonl"
        )


if __name__ == "__main__":
    typer.run(main)
