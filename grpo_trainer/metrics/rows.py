"""Files of one JSON object a line, each with its `step`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

from grpo_trainer.files import replace_file


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a file, without an incomplete last line of a running or killed writer."""
    return [row for _, row in _lines(path)]


def rows_so_far(path: Path) -> list[dict[str, Any]]:
    """Return the rows as `read_rows` does; none if nothing has written the file yet."""
    return read_rows(path) if path.exists() else []


def keep_steps(path: Path, steps_done: int) -> None:
    """Drop the rows after `steps_done`, whose steps a resumed run repeats; do nothing if there is no file."""
    if path.exists():
        kept = [line for line, row in _lines(path) if row["step"] <= steps_done]
        replace_file(path, "".join(f"{line}\n" for line in kept).encode())


class NewRows:
    """Reads the rows that another process appends to a file, each once."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: TextIO | None = None
        self._incomplete = ""

    def read(self) -> list[dict[str, Any]]:
        """Return the rows since the last call; the first call opens the file, which is not replaced from then on."""
        self._file = self._file or self._path.open()
        *lines, self._incomplete = (self._incomplete + self._file.read()).split("\n")
        return [json.loads(line) for line in lines]

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


def _lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    lines = path.read_text().split("\n")
    for line in lines[:-1]:  # the text after the last line break is incomplete
        yield line, json.loads(line)
