"""The commands of `grpo bench`. Options are read before torch is imported."""

from __future__ import annotations

import json
import os
from contextlib import nullcontext
from typing import Annotated, Any

import typer

from grpo_trainer.bench import api as rollout_api
from grpo_trainer.bench.command import JsonLine, print_figures, run_command
from grpo_trainer.bench.fence.options import FenceOptions
from grpo_trainer.bench.loop.options import LoopOptions
from grpo_trainer.bench.step.options import StepOptions
from grpo_trainer.bench.sync.options import SyncOptions
from grpo_trainer.config.options import build, with_options
from grpo_trainer.config.server import KEY_VARIABLE

app = typer.Typer(
    help="Benchmarks. Each prints its figures.",
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
ServerArgs = Annotated[
    list[str] | None, typer.Option(help="One more argument for the server; repeatable, as --server-arg=--seed=1.")
]


@app.command(short_help="Measure a whole run: speed and memory.")
@with_options(LoopOptions)
def loop(options: dict[str, Any], run_options: RunOptions = None) -> None:
    """Measure a whole `grpo run` with synthetic prompts and rewards. All its processes are real.

    Prints one JSON line. The figures cover the steps after the first --warmup-steps.
    """
    asked = build(LoopOptions, options)
    from grpo_trainer.bench.loop.measure import measure

    print(json.dumps(measure(asked, tuple(run_options or ()))))


@app.command(short_help="Measure optimisation steps: speed and memory.")
@with_options(StepOptions)
def step(options: dict[str, Any], json_line: JsonLine = False) -> None:
    """Measure optimisation steps: the trainer's own, on synthetic rollouts and a model with random weights.

    mfu is the share of --peak-tflops that the model's own arithmetic reaches: 6 operations a weight and token (4 for a
    frozen weight) and attention, without recomputation.
    """
    asked = build(StepOptions, options)
    from grpo_trainer.bench.step.measure import measure

    if (figures := measure(asked)) is not None:  # under torchrun, on the first rank alone
        print_figures(figures, as_json=json_line)


@app.command(short_help="Measure a weight bridge: duration of publishes, memory leaks.")
@with_options(SyncOptions)
def sync(options: dict[str, Any], server_arg: ServerArgs = None, json_line: JsonLine = False) -> None:
    """Measure a weight bridge: a model with random weights, a server, and a trainer that does nothing but publish."""
    asked = build(SyncOptions, options)
    _prepare_for_server()
    from grpo_trainer.bench.sync.measure import measure

    print_figures(measure(asked, tuple(server_arg or ())), as_json=json_line)


@app.command(short_help="Write shared weights under load, and look for answers with half-written weights.")
@with_options(FenceOptions)
def fence(options: dict[str, Any], server_arg: ServerArgs = None, json_line: JsonLine = False) -> None:
    """Write shared weights repeatedly under load, and check whether any answer used half-written weights.

    Exit code 1 if one did.
    """
    asked = build(FenceOptions, options)
    _prepare_for_server()
    from grpo_trainer.bench.fence.measure import measure

    figures = measure(asked, tuple(server_arg or ()))
    print_figures(figures, as_json=json_line)
    raise typer.Exit(int(figures["torn"] + figures["misnamed"] > 0))


@app.command(short_help="Measure a rollout API under load.")
@with_options(rollout_api.Load)
def api(options: dict[str, Any], json_line: JsonLine = False) -> None:
    """Load a rollout API and print its figures."""
    load = build(rollout_api.Load, options)
    with rollout_api.own_server(load.store) if load.url is None else nullcontext(load.url) as url:
        print_figures(rollout_api.measure(load, url), as_json=json_line)


def _prepare_for_server() -> None:
    """Set the environment of a benchmark that starts its own server."""
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # idle threads sleep: the server shares the cores
    os.environ.pop(KEY_VARIABLE, None)  # its clients send no key


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    run_command(app, "grpo bench")
