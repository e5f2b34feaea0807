"""The command `grpo bench loop`."""

from __future__ import annotations

import json
import os
from typing import Annotated, Any

import typer

from grpo_trainer.bench.command import run_command
from grpo_trainer.bench.loop.options import LoopOptions
from grpo_trainer.config.options import build, with_options

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

RunOptions = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[-- RUN_OPTIONS]", help="Options of `grpo run` that are added to the run: -- --checkpoint-interval 0"
    ),
]


@app.command()
@with_options(LoopOptions)
def loop(options: dict[str, Any], run_options: RunOptions = None) -> None:
    """Measure a whole `grpo run`: prompts and rewards are synthetic, server, rollout API, environment and trainer real.

    Prints one JSON line. Figures are those of the steps after --warmup-steps.
    """
    asked = build(LoopOptions, options)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from grpo_trainer.bench.loop.measure import measure

    print(json.dumps(measure(asked, tuple(run_options or ()))))


if __name__ == "__main__":
    run_command(app, "grpo bench loop")
