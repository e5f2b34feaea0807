"""Shared by the benchmarks' commands: progress on stderr, figures on stdout, an orderly exit."""

from __future__ import annotations

import json
import logging
import signal
import sys
from collections.abc import Mapping
from types import FrameType
from typing import Annotated, Any

import typer

from grpo_trainer.errors import GrpoError, StoppedError
from grpo_trainer.signals import ending_signals

JsonLine = Annotated[bool, typer.Option("--json", help="Print one JSON line.")]


def print_figures(figures: Mapping[str, Any], *, as_json: bool) -> None:
    """Print one JSON line, or a line for each figure."""
    if as_json:
        print(json.dumps(figures))
        return
    for name, value in figures.items():
        inner = {f"{name}.{part}": each for part, each in value.items()} if isinstance(value, dict) else {name: value}
        for full_name, each in inner.items():
            print(f"{full_name:>34}  {_text(each)}")


def _text(value: Any) -> str:
    text = " → ".join(map(str, value)) if isinstance(value, (tuple, list)) else "" if value is None else str(value)
    return text or "-"


def _stop(number: int, _: FrameType | None) -> None:
    for each in ending_signals():
        signal.signal(each, signal.SIG_IGN)  # the server is ending already
    raise StoppedError(number)


def run_command(app: typer.Typer, name: str) -> None:
    """Run a command as the program; report an error that the user can fix by one message and an exit code."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    logging.getLogger("httpx").setLevel(logging.WARNING)
    for number in ending_signals():
        signal.signal(number, _stop)
    try:
        app(prog_name=name)
    except GrpoError as error:
        sys.stderr.write(f"grpo: {error}\n")
        sys.exit(error.exit_code)
