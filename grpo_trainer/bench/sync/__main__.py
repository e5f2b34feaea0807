"""The command `grpo bench sync`."""

from __future__ import annotations

import json
from typing import Any

import typer

from grpo_trainer.bench.command import JsonLine, ServerArgs, run_command, share_cores
from grpo_trainer.bench.sync.options import SyncOptions
from grpo_trainer.config.options import build, with_options

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
@with_options(SyncOptions)
def sync(
    options: dict[str, Any],
    server_arg: ServerArgs = None,
    json_line: JsonLine = False,
) -> None:
    """Measure a weight bridge: a model with random weights, a server, and a trainer that does nothing but publish."""
    asked = build(SyncOptions, options)
    share_cores()
    from grpo_trainer.bench.sync.measure import measure
    from grpo_trainer.bench.sync.report import as_dict, as_table

    figures = as_dict(measure(asked, tuple(server_arg or ())))
    print(json.dumps(figures) if json_line else as_table(figures))


if __name__ == "__main__":
    run_command(app, "grpo bench sync")
