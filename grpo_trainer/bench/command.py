"""What the benchmarks' commands share: progress on stderr, figures on stdout, an orderly end."""

from __future__ import annotations

import logging
import signal
import sys
from types import FrameType

import typer

from grpo_trainer.errors import GrpoError, StoppedError

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def _stop(number: int, _: FrameType | None) -> None:
    for each in SIGNALS:
        signal.signal(each, signal.SIG_IGN)  # once is enough: the server is being ended
    raise StoppedError(f"stopped by {signal.Signals(number).name}", number)


def run_command(app: typer.Typer, name: str) -> None:
    """Run it as the program; an error that the user can mend is one message and an exit code."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    logging.getLogger("httpx").setLevel(logging.WARNING)
    for number in SIGNALS:
        signal.signal(number, _stop)
    try:
        app(prog_name=name)
    except GrpoError as error:
        sys.stderr.write(f"grpo: {error}\n")
        sys.exit(error.exit_code)
