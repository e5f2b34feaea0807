"""Writes files and folders completely or not at all, with errors that name them."""

from __future__ import annotations

import errno
import io
import logging
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from grpo_common.folders import sync as sync
from grpo_common.folders import temporary_name
from grpo_common.folders import whole_folder as whole_folder
from grpo_common.locks import HeldError, hold
from grpo_trainer.errors import ConfigError, FolderGoneError

METRICS_FILE = "metrics.jsonl"
"""A run's steps, one JSON object a line; a folder with this file holds a run."""

SAMPLES_FILE = "samples.jsonl"
"""Some of each step's sequences (`--log-samples`)."""

LOCK_FILE = "writer.lock"
"""Lock of the process that writes into a folder; the file holds the process's pid."""

log = logging.getLogger(__name__)


def write_bytes(path: Path, data: bytes | memoryview) -> None:
    """Write a file; errors name it, which the operating system's own do only when opening.

    Serialise first and write the bytes with this: torch and safetensors turn a full disk into other errors.

    Raises:
        OSError: the file could not be written; with `filename`.
    """
    try:
        path.write_bytes(data)
    except OSError as error:
        error.filename = str(path)
        raise


def write_tensors(path: Path, value: Any) -> None:
    """Write a file by `torch.save`, completely or not at all, without a second copy in memory.

    Raises:
        OSError: the file could not be written; with `filename`. torch would turn a full disk into another error.
    """
    import torch

    try:
        with _replacing(path) as temporary, honest_file(temporary) as file:
            torch.save(value, file)
    except OSError as error:
        error.filename = str(path)
        raise


@contextmanager
def honest_file(path: Path) -> Iterator[IO[bytes]]:
    """Open a new binary file whose first error is raised, for libraries that turn a full disk into other errors."""
    file = _FirstError(path, "wb")
    try:
        with io.BufferedWriter(file) as stream:
            yield stream
    except BaseException as error:
        raise file.error or error from None


class _FirstError(io.FileIO):
    """A file that stores its first error."""

    error: OSError | None = None

    def write(self, data: Any) -> int | None:
        try:
            return super().write(data)
        except OSError as error:
            self.error = self.error or error
            raise


def replace_file(path: Path, data: bytes, mode: int = 0o644) -> None:
    """Write a file completely or not at all; an existing file is replaced."""
    with _replacing(path) as temporary:
        temporary.touch(mode)  # so that no one else can read it, if `mode` says so, while it is written
        write_bytes(temporary, data)
        temporary.chmod(mode)


@contextmanager
def _replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path that replaces `path` if the block succeeds, and is deleted if it fails."""
    temporary = temporary_name(path)
    try:
        yield temporary
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def existing(path: Path) -> Path:
    """The folder, or the nearest above it that is there."""
    return next(each for each in (path, *path.parents) if os.access(each, os.F_OK))


def refuse_unwritable(folder: Path, flag: str) -> None:
    """Raise a `ConfigError` if nothing can be written into a folder, or it can't be made; nothing stays there."""
    there = existing(folder)
    try:  # what its mode says is not enough: root may write into /proc, and nobody on a full disk
        Path(tempfile.mkdtemp(prefix=".", dir=there)).rmdir()
    except OSError as error:
        got, fix = f"{there}: {error.strerror}", f"choose another {flag}"
        raise ConfigError(
            "can't be written", field=f"{flag} {folder}", got=got, wanted="a folder of yours", fix=fix
        ) from None


def refuse_to_mix_runs(folder: Path, resume: str, flag: str) -> None:
    """Raise a `ConfigError` if the folder can't be written, or has a run that `--resume` does not continue.

    A new one would mix with it.
    """
    refuse_unwritable(folder, flag)
    if resume == "never" and (folder / METRICS_FILE).exists():
        raise ConfigError(
            "holds a run already",
            field=flag,
            got=folder,
            wanted="a new folder",
            fix="continue it with --resume auto, or choose another folder",
        )


class HeldFolder:
    """A folder that this process writes into."""

    def __init__(self, path: Path, flag: str) -> None:
        self._path, self._flag = path, flag
        self._handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)  # keeps its inode number from reuse

    def check(self) -> None:
        """Raise a `FolderGoneError` if the folder was deleted, moved or replaced. This costs two system calls."""
        try:
            found = self._path.stat()
        except OSError as error:
            got = str(error.strerror)
        else:
            if os.path.samestat(found, os.fstat(self._handle)):
                return
            got = "another folder"
        raise FolderGoneError(
            "deleted while a run writes into it", field=f"{self._flag} {self._path}", got=got, wanted="the run's folder"
        )

    def close(self) -> None:
        os.close(self._handle)


@contextmanager
def held_folder(folder: Path, flag: str) -> Iterator[HeldFolder]:
    """Keep other processes from writing a run, or its checkpoints, into a folder; a `ConfigError` names who does."""
    folder.mkdir(parents=True, exist_ok=True)
    handle = None
    try:
        handle = hold(folder / LOCK_FILE)
    except HeldError as held:
        raise ConfigError(
            "in use",
            field=f"{flag} {folder}",
            got=f"process {held.holder}, which writes into it",
            wanted="a folder that no other process uses",
            fix=f"end process {held.holder}, or choose another folder",
        ) from None
    except OSError as error:
        if error.errno not in (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK):
            raise
        log.warning("%s: its file system has no locks: nothing keeps a second run from writing there", folder)
    held = HeldFolder(folder, flag)
    try:
        yield held
    finally:
        held.close()
        if handle is not None:
            os.close(handle)


def remove_remains(folder: Path, pattern: str) -> None:
    """Remove temporary files and folders of a killed process whose names match a regular expression.

    A folder that was moved aside to be replaced, and was not, gets its name again.
    """
    remains = re.compile(rf"\.({pattern})\.[0-9a-f]{{8}}\.tmp(\.aside\.tmp)?")
    for path in sorted(folder.iterdir(), reverse=True) if folder.is_dir() else ():  # `.aside.tmp` before its `.tmp`
        if found := remains.fullmatch(path.name):
            if found[2] and not (folder / found[1]).exists():
                path.rename(folder / found[1])
                continue
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


def folders_named(folder: Path, pattern: str, *, containing: str) -> list[Path]:
    """Return the subfolders whose whole name matches `pattern` and which contain a file `containing`, oldest first."""
    found = [
        path
        for path in (folder.iterdir() if folder.is_dir() else ())
        if re.fullmatch(pattern, path.name) and not path.is_symlink() and (path / containing).is_file()
    ]
    return sorted(found, key=lambda path: path.stat().st_mtime_ns)
