"""Folders that are written completely or not at all."""

from __future__ import annotations

import ctypes
import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def whole_folder(path: Path) -> Iterator[Path]:
    """Yield a temporary folder that becomes `path` if the block succeeds, and is deleted if it fails.

    An existing folder at `path` is replaced in one operation, so readers find either the old or the new one. If `path`
    is a symbolic link, the folder to which it leads is replaced.
    """
    path = path.resolve()
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = temporary_name(path)
    temporary.mkdir()
    try:
        yield temporary
        if path.exists():
            _exchange(temporary, path)
            shutil.rmtree(temporary)
        else:
            temporary.rename(path)
        sync(path.parent)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def temporary_name(path: Path) -> Path:
    """Return a name beside `path`, which `grpo_trainer.files.remove_remains` knows."""
    return path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.tmp")


def sync(path: Path) -> None:
    """Sync the content of a file, or the names in a folder, to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


AT_FDCWD, RENAME_EXCHANGE = -100, 2


def _exchange(one: Path, other: Path) -> None:
    """Swap two folders in one operation, or in three on a file system that does not support it."""
    paths = os.fsencode(one), os.fsencode(other)
    libc = ctypes.CDLL(None)
    if hasattr(libc, "renameat2") and not libc.renameat2(AT_FDCWD, paths[0], AT_FDCWD, paths[1], RENAME_EXCHANGE):
        return
    aside = one.with_name(f"{one.name}.aside.tmp")
    other.rename(aside)
    try:
        one.rename(other)
    except BaseException:
        aside.rename(other)
        raise
    aside.rename(one)
