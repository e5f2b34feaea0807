"""Files of one JSON object a line, each with its `step`.

Any process may be killed while it writes, disks tear files, and people edit them. So no reader trusts a line: one that
is no row is left out and counted, and it stays in the file.
"""

from __future__ import annotations

import codecs
import json
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from grpo_common.formats import ROWS_FORMAT, check_format
from grpo_trainer.files import replace_file

ENDS = 5
"""Tables show the mean reward of this many first and last steps."""
LAST_BYTES = 1 << 16
"""The end of a file that `last_rows` reads."""
LARGEST, LARGEST_FLOAT = 2**53, 1e150
"""Whole numbers below this are exact in floating point; squares of numbers below this are finite."""

Row = dict[str, Any]
Check = Callable[[Row], Row | None]
"""Returns the row with values of the right kinds; None: it is no row."""


class Rows(NamedTuple):
    """What a file has."""

    rows: list[Row]
    unreadable: int = 0  # number of lines that are no rows


def is_number(value: object) -> bool:
    """Return whether a decoded value is a number."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def figures(row: Row) -> Row:
    """Return a row of metrics: a value that is no number becomes None, as one that is not finite."""
    return {key: value if is_number(value) else None for key, value in row.items()}


def a_sample(row: Row) -> Row | None:
    """Return a row of samples.jsonl (`grpo_trainer.logs.samples`); None: it is none."""
    row = {"environment": None, "version": None, **row}  # some environments send none
    numbers = all(is_number(row.get(key)) for key in ("group", "cut", "reward", "advantage"))
    numbers &= row["version"] is None or is_number(row["version"])
    is_named = row["environment"] is None or isinstance(row["environment"], int)
    lists = [row.get(key) for key in ("pieces", "ratios", "trained")]
    if not (numbers and is_named and isinstance(row.get("prompt"), str)):
        return None
    if not all(isinstance(each, list) for each in lists) or len({len(each or ()) for each in lists}) > 1:
        return None
    pieces, ratios, _ = lists
    is_right = all(isinstance(piece, str) for piece in pieces or ())
    return row if is_right and all(ratio is None or is_number(ratio) for ratio in ratios or ()) else None


def read_file(path: Path, check: Check = figures) -> Rows:
    """Return a file's rows, without an incomplete last line of a running or killed writer; none if there is no file.

    Raises:
        FormatError: a newer version wrote one of them. All that read rows raise it.
    """
    return read_lines(path, path.read_bytes(), check) if path.exists() else Rows([])


def read_rows(path: Path) -> list[Row]:
    """Return the rows of a file of metrics; none if nothing has written the file yet."""
    return read_file(path).rows


def read_lines(path: Path, content: bytes, check: Check = figures) -> Rows:
    """Return the rows in a part of a file that begins with a line."""
    rows = [parse_row(path, line, check) for line in _lines(content)[:-1]]
    found = [row for row in rows if row is not None]
    return Rows(found, len(rows) - len(found))


def last_rows(path: Path) -> Rows:
    """Return the last rows of a file, `ENDS` or more where it has them; none if there is no file."""
    if not path.is_file():
        return Rows([])
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - LAST_BYTES))
        content = file.read()
    return read_lines(path, content if size <= LAST_BYTES else content.partition(b"\n")[2])


def parse_row(path: Path, line: bytes, check: Check = figures) -> Row | None:
    """Return a row of the file; None: the line is none."""
    with suppress(ValueError, RecursionError):
        row = json.loads(
            line.decode(),
            parse_constant=lambda _: None,
            parse_float=lambda text: number if abs(number := float(text)) < LARGEST_FLOAT else None,
            parse_int=lambda text: number if abs(number := int(text)) < LARGEST else None,
        )
        if isinstance(row, dict):
            check_format(str(path), row, ROWS_FORMAT)
            if isinstance(step := row.get("step"), int) and 0 <= step < LARGEST:
                return check(row)
    return None


def keep_steps(path: Path, steps_done: int) -> None:
    """Drop the rows after `steps_done`, whose steps a resumed run repeats; do nothing if there is no file.

    Lines that are no rows stay, an incomplete last one too: what they were is not known.
    """
    if not path.exists():
        return
    content = path.read_bytes()
    rows = ((line, parse_row(path, line)) for line in _lines(content) if line)
    kept = b"".join(line + b"\n" for line, row in rows if row is None or row["step"] <= steps_done)
    if kept != content:
        replace_file(path, kept)


def which(row: Row) -> tuple[int, float | None]:
    """Return what tells a row from those of the same step before a restart. Clocks may be set back."""
    return row["step"], row.get("time")


class NewRows:
    """Reads the rows that another process appends to a file, each once.

    A trainer that restarts replaces the file by one without the steps that it takes again.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: BinaryIO | None = None
        self._incomplete = b""
        self._read = set[tuple[int, float | None]]()

    def read(self) -> list[Row]:
        """Return the rows since the last call."""
        with suppress(FileNotFoundError):  # deleted, which ends the run
            if self._file is not None and not os.path.samestat(os.fstat(self._file.fileno()), self._path.stat()):
                self.close()
                self._file = None
        if self._file is None:
            self._file, self._incomplete = self._path.open("rb"), b""
        content = self._incomplete + self._file.read()
        self._incomplete = _lines(content)[-1]
        rows = [row for row in read_lines(self._path, content).rows if which(row) not in self._read]
        self._read.update(map(which, rows))
        return rows

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


def _lines(content: bytes) -> list[bytes]:
    """Return the lines; the last is what follows the last line break, usually nothing."""
    return content.removeprefix(codecs.BOM_UTF8).split(b"\n")
