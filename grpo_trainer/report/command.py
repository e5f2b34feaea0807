"""`grpo report`: write the page, and write it again during the run."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import datetime
from hashlib import sha256
from pathlib import Path

from grpo_trainer.files import replace_file
from grpo_trainer.report.page import page
from grpo_trainer.report.read import read_run

REPORT_FILE = "report.html"
MOST_OF_NAMES = 50
"""Characters of the runs' names in a comparison's file name; a file name may have 255 bytes."""
WATCH_SECONDS = 5


def report_path(folders: Sequence[Path], output: Path | None) -> Path:
    """Where the page goes: into the run's folder, or the first one's, unless said otherwise."""
    return output or folders[0] / (REPORT_FILE if len(folders) == 1 else _comparison_file(folders))


def _comparison_file(folders: Sequence[Path]) -> str:
    """Name the page after the runs, so that each comparison has its own; long names end with a digest of them all."""
    names = "-".join(folder.resolve().name for folder in folders)
    if len(names) > MOST_OF_NAMES:
        names = f"{names[:MOST_OF_NAMES]}-{sha256(names.encode()).hexdigest()[:8]}"
    return f"comparison-{names}.html"


def write_report(folders: Sequence[Path], path: Path, *, refresh_seconds: int = 0) -> bool:
    """Write the page, whole or not at all; returns whether all runs have taken their last step.

    Raises:
        ConfigError: a folder holds no run.
    """
    runs = [read_run(folder, may_be_empty=bool(refresh_seconds)) for folder in folders]
    done = all(run.is_done for run in runs)
    html = page(runs, made=datetime.now(), refresh_seconds=0 if done else refresh_seconds)
    replace_file(path, html.encode(errors="replace"))  # text of models may hold half characters
    return done


def watch(folders: Sequence[Path], path: Path, pause: Callable[[float], None] = time.sleep) -> None:
    """Write the page every few seconds until the runs are done, or Ctrl-C; the last one does not reload itself."""
    try:
        while not write_report(folders, path, refresh_seconds=WATCH_SECONDS):
            pause(WATCH_SECONDS)
    except KeyboardInterrupt:
        write_report(folders, path)
