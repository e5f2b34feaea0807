"""The command `grpo bench sync`."""

from __future__ import annotations

from typing import Any

import typer

from grpo_trainer.bench.command import JsonLine, ServerArgs, print_figures, run_command, share_cores
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

    print_figures(measure(asked, tuple(server_arg or ())), as_json=json_line)


if __name__ == "__main__":
    run_command(app, "grpo bench sync")
