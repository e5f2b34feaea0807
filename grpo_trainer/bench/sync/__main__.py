"""The command `grpo bench sync`."""

from __future__ import annotations

import json
import os
from typing import Annotated, Any

import typer

from grpo_trainer.bench.command import run_command
from grpo_trainer.bench.sync.options import SyncOptions
from grpo_trainer.options import build, with_options

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
@with_options(SyncOptions)
def sync(
    options: dict[str, Any],
    server_arg: Annotated[
        list[str] | None, typer.Option(help="One more argument for the server; repeatable, as --server-arg=--seed=1.")
    ] = None,
    json_line: Annotated[bool, typer.Option("--json", help="Print one JSON line.")] = False,
) -> None:
    """Measure a weight bridge: a model with random weights, a server, and a trainer that does nothing but publish."""
    asked = build(SyncOptions, options)
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # idle threads sleep: the server may share the cores
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from grpo_trainer.bench.sync.measure import measure
    from grpo_trainer.bench.sync.report import as_dict, as_table

    figures = as_dict(measure(asked, tuple(server_arg or ())))
    print(json.dumps(figures) if json_line else as_table(figures))


if __name__ == "__main__":
    run_command(app, "grpo bench sync")
