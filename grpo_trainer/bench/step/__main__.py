"""The command `grpo bench step`."""

from __future__ import annotations

import json
import os
from typing import Any

import typer

from grpo_trainer.bench.command import JsonLine, run_command
from grpo_trainer.bench.step.options import StepOptions
from grpo_trainer.config.options import build, with_options

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
@with_options(StepOptions)
def step(
    options: dict[str, Any],
    json_line: JsonLine = False,
) -> None:
    """Measure optimisation steps: the trainer's own, on synthetic rollouts and a model with random weights.

    mfu is the share of --peak-tflops that the model's own arithmetic takes: 6 operations a weight and token (4 where it
    is frozen) and attention, whatever is computed a second time.
    """
    asked = build(StepOptions, options)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from grpo_trainer.bench.step.measure import as_dict, measure
    from grpo_trainer.bench.sync.report import as_table

    found = measure(asked)
    if found is None:  # under torchrun, on all ranks but the first
        return
    figures = as_dict(asked, found)
    print(json.dumps(figures) if json_line else as_table(figures))


if __name__ == "__main__":
    run_command(app, "grpo bench step")
