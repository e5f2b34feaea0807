"""Files of one JSON object a line, each with its `step`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from grpo_trainer.files import replace_file


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a file that may be written at this moment, or whose writer was killed: a last half line is none."""
    return [row for _, row in _lines(path)]


def keep_steps(path: Path, steps_done: int) -> None:
    """Drop the rows after `steps_done`, of steps that a resumed run takes again; no file is none to drop from."""
    if path.exists():
        kept = [line for line, row in _lines(path) if row["step"] <= steps_done]
        replace_file(path, "".join(f"{line}\n" for line in kept).encode())


def _lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    lines = path.read_text().split("\n")
    for line in lines[:-1]:  # what follows the last line break is not whole yet
        yield line, json.loads(line)
