"""Folders of runs that earlier versions left (tests/data/formats)."""

from __future__ import annotations

import shutil
from pathlib import Path

FIRST = Path(__file__).parent / "data" / "formats" / "v0.1.0"
FINISHED, UNFINISHED = FIRST / "finished", FIRST / "unfinished"
MODEL = FIRST / "model"
HOME = "/home/user/grpo"
"""Where the runs were."""


def copy_of(run: Path, folder: Path) -> Path:
    """Copy a run into a folder, where a test may change it."""
    return Path(shutil.copytree(run, folder / run.name))
