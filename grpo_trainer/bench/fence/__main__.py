"""The command `grpo bench fence`."""

from __future__ import annotations

from typing import Any

import typer

from grpo_trainer.bench.command import JsonLine, ServerArgs, print_figures, run_command, share_cores
from grpo_trainer.bench.fence.options import FenceOptions
from grpo_trainer.config.options import build, with_options

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
@with_options(FenceOptions)
def fence(
    options: dict[str, Any],
    server_arg: ServerArgs = None,
    json_line: JsonLine = False,
) -> None:
    """Write shared weights over and over under load, and judge whether any answer saw them half written.

    Exit code 1 if one did.
    """
    asked = build(FenceOptions, options)
    share_cores()
    from grpo_trainer.bench.fence.measure import measure

    figures = measure(asked, tuple(server_arg or ()))
    print_figures(figures, as_json=json_line)
    raise typer.Exit(int(figures["torn"] + figures["misnamed"] > 0))


if __name__ == "__main__":
    run_command(app, "grpo bench fence")
