"""Files and folders that are whole or not there, and errors that say which."""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def write_bytes(path: Path, data: bytes) -> None:
    """Write a file; an error names it (the operating system's own does so only when opening).

    Serialise first and write with this: torch and safetensors turn a full disk into errors of their own.

    Raises:
        OSError: with `filename`.
    """
    try:
        path.write_bytes(data)
    except OSError as error:
        error.filename = str(path)
        raise


@contextmanager
def whole_folder(path: Path) -> Iterator[Path]:
    """A folder to write into that becomes `path` when the block ends well, and vanishes when it does not.

    A folder that is at `path` already is replaced.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.tmp")
    temporary.mkdir()
    try:
        yield temporary
        if path.exists():
            shutil.rmtree(path)
        temporary.rename(path)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
