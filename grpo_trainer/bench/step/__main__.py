"""The command `grpo bench step`."""

from __future__ import annotations

import os
from typing import Any

import typer

from grpo_trainer.bench.command import JsonLine, print_figures, run_command
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
    from grpo_trainer.bench.step.measure import measure

    if (figures := measure(asked)) is not None:  # under torchrun, on the first rank alone
        print_figures(figures, as_json=json_line)


if __name__ == "__main__":
    run_command(app, "grpo bench step")
