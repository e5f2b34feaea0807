"""state.json, the mark of a checkpoint: a run's progress, and a checksum of every other file. Needs no torch.

A folder without it is no checkpoint. A checkpoint whose files differ from it is damaged: `--resume auto` moves it aside
and takes the newest whole one.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

from grpo_common.errors import UserError
from grpo_common.formats import KEY, check_format
from grpo_trainer.errors import ConfigError
from grpo_trainer.files import refuse_to_mix_runs, refuse_unwritable, replace_file, sync
from grpo_trainer.versions import NO_OFFSETS, VersionOffset, VersionOffsets

STATE_FILE: Final = "state.json"
NAMES: Final = re.compile(r"(?:adapter_)?step_\d+|adapter_final|model_final")
"""Names of the folders that a run writes, see `policy.py`."""
FORMAT: Final = 1
"""Number of the format of a checkpoint's whole folder."""
READERS: Final = 4
"""Number of files that are read at the same time; hashing releases Python's GIL."""


@dataclass(frozen=True)
class Progress:
    """Progress of a run."""

    step: int = 0
    """Number of steps done."""
    policy_version: int = 0
    """The version after them."""
    batches: tuple[str, ...] = ()
    """Trained batches of the rollout API that are not acknowledged yet: they are once these steps are saved."""
    numbering: VersionOffsets = NO_OFFSETS
    """Jumps of the version numbers."""

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
class SavedCheckpoint:
    """A folder with a state.json, and its contents."""

    path: Path
    progress: Progress
    saved_at: float
    """Unix seconds."""
    files: Mapping[str, tuple[int, str]]
    """Path in the folder -> size in bytes and SHA-256."""


class DamagedError(UserError):
    """A checkpoint has changed since it was written. `field` names the file, `got` and `wanted` its states."""


# one checkpoint ------------------------------------------------------------------------------------------------------


def seal(folder: Path, progress: Progress) -> None:
    """Sync all files to the disk, then write state.json, which makes the folder a checkpoint.

    Raises:
        OSError: a file could not be written; with `filename`.
    """
    paths = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    paths = [path for path in paths if path.name != STATE_FILE and not path.match(".*.tmp")]
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


def read_state(folder: Path) -> SavedCheckpoint:
    """Read a folder's state.json.

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
        return SavedCheckpoint(folder, progress, content["saved_at"], files)
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise DamagedError("can't be read", field=STATE_FILE, got=f"{type(error).__name__}: {error}") from None


def check_files(saved: SavedCheckpoint) -> None:
    """Read every file and compare it with its checksum.

    Raises:
        DamagedError: a file differs; the error names it.
    """
    for name, (size, _) in saved.files.items():
        path = saved.path / name
        if not path.is_file():
            raise DamagedError(field=name, got="no such file", wanted=f"{size} bytes")
        if path.stat().st_size != size:
            raise DamagedError(field=name, got=f"{path.stat().st_size} bytes", wanted=f"{size} bytes")
    with ThreadPoolExecutor(READERS) as readers:
        sums = readers.map(lambda name: _checksum(saved.path / name), saved.files)
        for (name, (_, wanted)), found in zip(saved.files.items(), sums, strict=True):
            if found != wanted:
                raise DamagedError(field=name, got=f"checksum {found}", wanted=f"checksum {wanted}")


def _synced_checksum(path: Path) -> tuple[int, str]:
    with path.open("rb") as file:
        os.fsync(file.fileno())
        return os.fstat(file.fileno()).st_size, hashlib.file_digest(file, "sha256").hexdigest()


def _checksum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _checksum_of(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


# those of a folder ---------------------------------------------------------------------------------------------------


def saved_checkpoints(folder: Path) -> list[SavedCheckpoint]:
    """Return the checkpoints with a readable state.json, of any kind and including final ones, oldest first.

    Raises:
        FormatError: a newer version wrote one of them.
    """
    return _read(folder)[0]


def newest_whole(folder: Path, say: Callable[[str], None]) -> SavedCheckpoint | None:
    """Return the newest checkpoint whose checksums are right; move damaged ones aside, and report them by `say`.

    None: there is no checkpoint at all.

    Raises:
        ConfigError: all are damaged; nothing is moved.
        FormatError: a newer version wrote one of the checkpoints.
    """
    readable, damaged = _read(folder)
    for saved in reversed(readable):
        try:
            check_files(saved)
        except DamagedError as damage:
            damaged[saved.path] = damage
            continue
        for path, damage in damaged.items():
            aside = path.with_name(f"damaged_{path.name}")  # so that the run does not overwrite it
            if aside.exists():
                shutil.rmtree(aside)
            path.rename(aside)
            say(
                f"CHECKPOINT DAMAGED: {path}: {damage}. It is now {aside.name}, and the newest whole one before it is "
                "taken. The rollout API does not serve batches again that were acknowledged since then"
            )
        return saved
    _refuse(folder, damaged)
    return None


def refuse_another_run(folder: Path, resume: str) -> None:
    """Raise a `ConfigError` if a run's folder has steps or checkpoints that `--resume` does not continue."""
    refuse_to_mix_runs(folder, resume, "--run-dir")
    refuse_to_mix_checkpoints(folder / "checkpoints", resume, "--run-dir")


def refuse_to_mix_checkpoints(folder: Path, resume: str, flag: str) -> None:
    """Raise a `ConfigError` if the folder can't be written, or has checkpoints that `--resume` does not continue.

    A new run would delete them, and go on from them after its trainer's restart. Those of step 0 have learnt nothing.
    """
    refuse_unwritable(folder, flag)
    readable, damaged = _read(folder)
    found = [*damaged, *(one.path for one in readable if one.progress.step)]
    if resume == "never" and found:
        raise ConfigError(
            "has checkpoints already",
            field=flag,
            got=found[-1],
            wanted="a new folder",
            fix="continue with --resume auto, or choose another folder",
        )


def refuse_unreadable(folder: Path) -> None:
    """Refuse to resume where the state of no checkpoint can be read. The trainer checks all other files, too.

    Raises:
        ConfigError: there are checkpoints, and the error names them.
        FormatError: a newer version wrote one of them.
    """
    readable, damaged = _read(folder)
    if not readable:
        _refuse(folder, damaged)


def _read(folder: Path) -> tuple[list[SavedCheckpoint], dict[Path, DamagedError]]:
    """Return the checkpoints with a readable state.json, oldest first, and the others with the reason."""
    readable, damaged = [], {}
    for path in folder.iterdir() if folder.is_dir() else ():
        if not (NAMES.fullmatch(path.name) and (path / STATE_FILE).is_file()):
            continue
        try:
            readable.append(read_state(path))
        except DamagedError as damage:
            damaged[path] = damage
    return sorted(readable, key=lambda one: (one.progress.step, one.path)), damaged


def _refuse(folder: Path, damaged: Mapping[Path, DamagedError]) -> None:
    if damaged:
        raise ConfigError(
            "no checkpoint is whole, and nothing was changed",
            field=f"--resume auto, {folder}",
            got="; ".join(f"{path.name}: {damage}" for path, damage in damaged.items()),
            wanted="a whole checkpoint",
            fix="restore one from a copy; or move these away, to start at step 0",
        )
