"""The commands of `grpo bench`. Options are read before torch is imported."""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
from collections.abc import Mapping
from contextlib import nullcontext
from types import FrameType
from typing import Annotated, Any

import typer

from grpo_trainer.bench import api as rollout_api
from grpo_trainer.bench import loop as whole_run
from grpo_trainer.bench import publish
from grpo_trainer.bench import step as one_step
from grpo_trainer.config.flags import given, taking
from grpo_trainer.config.options import build
from grpo_trainer.config.server import KEY_VARIABLE
from grpo_trainer.errors import ConfigError, GrpoError, StoppedError
from grpo_trainer.signals import ending_signals

app = typer.Typer(
    help="Benchmarks. Each prints its figures as JSON.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

RunOptions = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[-- RUN_OPTIONS]",
        help="More options for `grpo run`, after --; for example: -- --checkpoint-interval 0",
    ),
]
JsonLine = Annotated[bool, typer.Option("--json", help="Print one line.")]


@app.command(cls=taking(whole_run.LoopOptions), short_help="Measure a whole run: speed and memory.")
def loop(ctx: typer.Context, run_options: RunOptions = None) -> None:
    """Measure a whole `grpo run` with synthetic prompts and rewards. All its processes are real.

    Prints one line. The figures cover the steps after the first --warmup-steps.
    """
    show(whole_run.measure(build(whole_run.LoopOptions, given(ctx)), tuple(run_options or ())), in_a_line=True)


@app.command(cls=taking(one_step.StepOptions), short_help="Measure optimisation steps: speed and memory.")
def step(ctx: typer.Context, json_line: JsonLine = False) -> None:
    """Measure optimisation steps: the trainer's own, on synthetic rollouts and a model with random weights.

    mfu is the share of --peak-tflops that the model's own arithmetic reaches: 6 operations a weight and token (4 for a
    frozen weight) and attention, without recomputation.
    """
    figures = one_step.measure(build(one_step.StepOptions, given(ctx)))
    if figures is not None:  # under torchrun, on the first rank alone
        show(figures, in_a_line=json_line)


@app.command(cls=taking(publish.SyncOptions), short_help="Measure a weight bridge: publishes and memory.")
def sync(ctx: typer.Context, json_line: JsonLine = False) -> None:
    """Measure a weight bridge: a model with random weights, a server, and a trainer that does nothing but publish."""
    asked = build(publish.SyncOptions, given(ctx))
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # idle threads sleep: the server shares the cores
    os.environ.pop(KEY_VARIABLE, None)  # its clients send no key
    show(publish.measure(asked), in_a_line=json_line)


@app.command(cls=taking(rollout_api.ApiOptions), short_help="Measure a rollout API under load.")
def api(ctx: typer.Context, json_line: JsonLine = False) -> None:
    """Load a rollout API and print its figures."""
    load = build(rollout_api.ApiOptions, given(ctx))
    with rollout_api.own_server(load.store) if load.url is None else nullcontext(load.url) as url:
        show(rollout_api.measure(load, url), in_a_line=json_line)


@app.command(hidden=True, context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def fence() -> None:
    """Name what replaces this command."""
    fix = "run pytest tests/integration/test_torn_weights.py, on a GPU tests/gpu/test_torn_weights.py"
    raise ConfigError("is a test now", field="grpo bench fence", fix=fix)


def show(figures: Mapping[str, Any], *, in_a_line: bool) -> None:
    print(json.dumps(figures, indent=None if in_a_line else 1))


def run_command(app: typer.Typer, name: str) -> None:
    """Run a command as the program; report an error that the user can fix by one message and an exit code."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    logging.getLogger("httpx").setLevel(logging.WARNING)

    def stop(number: int, _: FrameType | None) -> None:
        for each in ending_signals():
            signal.signal(each, signal.SIG_IGN)  # the server is ending already
        raise StoppedError(number)

    for number in ending_signals():
        signal.signal(number, stop)
    try:
        app(prog_name=name)
    except GrpoError as error:
        sys.stderr.write(f"grpo: {error}\n")
        sys.exit(error.exit_code)


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    run_command(app, "grpo bench")
