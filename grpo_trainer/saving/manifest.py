"""state.json: a run's progress, and a checksum of every other file. A folder without it is no checkpoint."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from grpo_common.errors import UserError
from grpo_common.formats import KEY, check_format
from grpo_trainer.errors import ConfigError
from grpo_trainer.files import replace_file, sync
from grpo_trainer.versions import NO_OFFSETS, VersionOffset, VersionOffsets

STATE_FILE = "state.json"
DAMAGED_PREFIX = "damaged_"
"""Begin of the name of a checkpoint that was moved aside."""
FORMAT = 1
"""Number of the format of a checkpoint's whole folder."""

READERS = 4
"""Number of files that are read at the same time; hashing releases Python's GIL."""


@dataclass(frozen=True)
class Progress:
    """Progress of a run: the number of steps done, and the policy version after them.

    Attributes:
        batches: trained batches of the rollout API that are not acknowledged yet; they are acknowledged once a
            checkpoint of these steps is complete.
        numbering: jumps of the version numbers.
    """

    step: int = 0
    policy_version: int = 0
    batches: tuple[str, ...] = ()
    numbering: VersionOffsets = NO_OFFSETS

    def going_on_as(self, version: int) -> Progress:
        """Return the progress with the version number that the server requires, for the same weights.

        The first step of a run records no jump: samples of lower versions belong to another run, and are as old as
        their numbers say.
        """
        numbering = self.numbering.jumped(self.policy_version, version) if self.step else self.numbering
        return replace(self, policy_version=version, numbering=numbering)

    def after_step(self, batches: tuple[str, ...], *, updated: bool) -> Progress:
        """Return the progress after one more step; a skipped step does not change the version."""
        version = self.policy_version + int(updated)
        return replace(self, step=self.step + 1, policy_version=version, batches=batches)


@dataclass(frozen=True)
class State:
    """Contents of a state.json.

    Attributes:
        saved_at: Unix seconds.
        files: path in the folder -> size in bytes and SHA-256.
    """

    progress: Progress
    saved_at: float
    files: Mapping[str, tuple[int, str]]


class DamagedError(UserError):
    """A checkpoint has changed since it was written. `field` names the file, `got` and `wanted` its states."""


def seal(folder: Path, progress: Progress) -> None:
    """Sync all files to the disk, then write state.json, which makes the folder a checkpoint.

    Raises:
        OSError: a file could not be written; with `filename`.
    """
    paths = _paths(folder)
    with ThreadPoolExecutor(READERS) as readers:
        sums = list(readers.map(_synced_checksum, paths))
    content = {
        KEY: FORMAT,
        **asdict(progress),
        "saved_at": time.time(),
        "files": {str(path.relative_to(folder)): each for path, each in zip(paths, sums, strict=True)},
    }
    content["checksum"] = _checksum_of(content)
    for inner in {path.parent for path in paths} - {folder}:
        sync(inner)
    replace_file(folder / STATE_FILE, json.dumps(content, indent=1).encode())
    sync(folder / STATE_FILE)
    sync(folder)


def read_state(folder: Path) -> State:
    """Return the contents of a folder's state.json.

    Raises:
        DamagedError: the file is damaged.
        FormatError: a newer version wrote the checkpoint.
    """
    path = folder / STATE_FILE
    try:
        content = json.loads(path.read_text())
        check_format(str(path), content, FORMAT)
        if content.pop("checksum") != _checksum_of(content):
            raise DamagedError(field=STATE_FILE, got="another checksum", wanted="its own checksum")
        offsets = VersionOffsets(tuple(VersionOffset(**jump) for jump in content["numbering"]["jumps"]))
        progress = Progress(content["step"], content["policy_version"], tuple(content["batches"]), offsets)
        files = {name: (int(size), str(sha)) for name, (size, sha) in content["files"].items()}
        return State(progress, content["saved_at"], files)
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise DamagedError("can't be read", field=STATE_FILE, got=f"{type(error).__name__}: {error}") from None


def unreadable(checkpoints: Iterable[Path]) -> dict[Path, DamagedError]:
    """Return the checkpoints whose state.json can't be read, and why.

    Raises:
        FormatError: a newer version wrote one of them.
    """
    damaged = {}
    for path in checkpoints:
        try:
            read_state(path)
        except DamagedError as damage:
            damaged[path] = damage
    return damaged


def refuse_unreadable(folder: Path) -> None:
    """Refuse to resume where the state of no checkpoint can be read. The trainer checks all other files, too.

    Args:
        folder: of the checkpoints.

    Raises:
        ConfigError: there are checkpoints, and the error names them.
        FormatError: a newer version wrote one of them.
    """
    names = (path.parent for path in sorted(folder.glob(f"*/{STATE_FILE}")))
    checkpoints = [path for path in names if not path.name.startswith((DAMAGED_PREFIX, "."))]
    damaged = unreadable(checkpoints)
    if damaged and len(damaged) == len(checkpoints):
        raise all_damaged(folder, damaged)


def all_damaged(folder: Path, damaged: Mapping[Path, DamagedError]) -> ConfigError:
    """Return the error of a run that can't be resumed."""
    return ConfigError(
        "no checkpoint is whole, and nothing was changed",
        field=f"--resume auto, {folder}",
        got="; ".join(f"{path.name}: {damage}" for path, damage in damaged.items()),
        wanted="a whole checkpoint",
        fix="restore one from a copy; or move these away, to start at step 0",
    )


def check_files(folder: Path, state: State) -> None:
    """Read every file and compare it with its checksum.

    Raises:
        DamagedError: a file differs; the error names it.
    """
    for name, (size, _) in state.files.items():
        path = folder / name
        if not path.is_file():
            raise DamagedError(field=name, got="no such file", wanted=f"{size} bytes")
        if path.stat().st_size != size:
            raise DamagedError(field=name, got=f"{path.stat().st_size} bytes", wanted=f"{size} bytes")
    with ThreadPoolExecutor(READERS) as readers:
        sums = readers.map(lambda name: _checksum(folder / name), state.files)
        for (name, (_, wanted)), found in zip(state.files.items(), sums, strict=True):
            if found != wanted:
                raise DamagedError(field=name, got=f"checksum {found}", wanted=f"checksum {wanted}")


def _paths(folder: Path) -> list[Path]:
    """Return every file of a checkpoint except state.json and temporary files."""
    found = sorted(path for path in folder.rglob("*") if path.is_file())
    return [path for path in found if path.name != STATE_FILE and not path.match(".*.tmp")]


def _synced_checksum(path: Path) -> tuple[int, str]:
    with path.open("rb") as file:
        os.fsync(file.fileno())
        return os.fstat(file.fileno()).st_size, hashlib.file_digest(file, "sha256").hexdigest()


def _checksum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _checksum_of(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
