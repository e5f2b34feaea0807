"""Files of one JSON object a line, each with its `step`."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

from grpo_common.formats import ROWS_FORMAT, check_format
from grpo_trainer.files import replace_file

ENDS = 5
"""Tables show the mean reward of this many first and last steps."""


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a file, without an incomplete last line of a running or killed writer.

    Raises:
        FormatError: a newer version wrote one of them.
    """
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
    """Reads the rows that another process appends to a file, each once.

    A trainer that restarts replaces the file by one without the steps that it takes again.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: TextIO | None = None
        self._incomplete = ""
        self._newest = float("-inf")

    def read(self) -> list[dict[str, Any]]:
        """Return the rows since the last call."""
        if self._file is None or self._is_replaced(self._file):
            self.close()
            self._file, self._incomplete = self._path.open(), ""
        *lines, self._incomplete = (self._incomplete + self._file.read()).split("\n")
        rows = [row for line in lines if (row := parse_row(self._path, line))["time"] > self._newest]
        self._newest = max([self._newest, *(row["time"] for row in rows)])
        return rows

    def _is_replaced(self, file: TextIO) -> bool:
        try:
            return not os.path.samestat(os.fstat(file.fileno()), self._path.stat())
        except FileNotFoundError:
            return False  # deleted, which ends the run

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


def _lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    lines = path.read_text().split("\n")
    for line in lines[:-1]:  # the text after the last line break is incomplete
        yield line, parse_row(path, line)


def parse_row(path: Path, line: str | bytes) -> dict[str, Any]:
    """Return a row of the file.

    Raises:
        FormatError: a newer version wrote it.
    """
    row = json.loads(line)
    check_format(str(path), row, ROWS_FORMAT)
    return row
