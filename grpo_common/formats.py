"""Numbers of formats: a reader refuses what a newer version wrote, instead of emptying it or reading half of it.

A JSON object has its number under `format`, a SQLite file as its `user_version`. What has no number is format 1.
CONTRIBUTING.md lists all formats.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping
from pathlib import Path

from grpo_common.errors import UserError

KEY = "format"
ROWS_FORMAT = 1
"""Number of the format of files with rows of steps: metrics.jsonl, samples.jsonl, the environments' own metrics."""


class FormatError(UserError):
    """A file or a message is of a newer version of this program. `got` and `wanted` have the numbers."""

    exit_code = 2


def check_format(field: str, content: object, known: int, error: type[UserError] = FormatError) -> None:
    """Check the number of a JSON value, before anything else of it is read.

    Args:
        field: the file, or the message and who sent it.
        content: the decoded value, or the number itself. A value that is no object has no number.
        known: the highest number that the caller reads.
        error: the class to raise; of a message, that of the sender's other refusals.

    Raises:
        FormatError: the number is higher.
    """
    number = content.get(KEY, 1) if isinstance(content, Mapping) else content if isinstance(content, int) else 1
    if not isinstance(number, int) or number > known:
        raise error(
            "of a newer version",
            field=field,
            got=f"format {number}",
            wanted=f"format {known}, the highest that this version reads",
            fix="install the version that wrote it, or a newer one, and repeat the command; nothing was changed",
        )


def check_sqlite(path: Path, known: int) -> None:
    """Check the number of a SQLite file without changing it or its journal; do nothing if there is no file.

    Raises:
        FormatError: the number is higher.
        sqlite3.Error: it is no SQLite file.
    """
    if path.exists() and path.stat().st_size:
        # Without a journal the file is read as it is. Beside a journal, SQLite makes its index (`-shm`), as any reader.
        how = "mode=ro" if Path(f"{path}-wal").exists() else "immutable=1"
        connection = sqlite3.connect(f"{path.absolute().as_uri()}?{how}", uri=True)
        try:
            check_format(str(path), connection.execute("PRAGMA user_version").fetchone()[0], known)
        finally:
            connection.close()
