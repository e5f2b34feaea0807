"""Finds the checkpoints in a folder, and the one to resume from."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from grpo_trainer.metrics.health import duration
from grpo_trainer.policy import Adapter, AllWeights
from grpo_trainer.saving.manifest import (
    DAMAGED_PREFIX,
    STATE_FILE,
    DamagedError,
    State,
    all_damaged,
    check_files,
    read_state,
    unreadable,
)


@dataclass(frozen=True)
class Found:
    """A folder with a state.json."""

    path: Path
    state: State


def saved_checkpoints(folder: Path) -> list[Found]:
    """Return the checkpoints with a readable state.json, of any kind and including final ones, oldest first.

    Raises:
        FormatError: a newer version wrote one of them.
    """
    found = []
    for path in _folders(folder):
        try:
            found.append(Found(path, read_state(path)))
        except DamagedError:
            continue  # `newest_whole` reports it
    return sorted(found, key=lambda one: (one.state.progress.step, one.path))


def newest_whole(folder: Path, say: Callable[[str], None]) -> Found | None:
    """Return the newest checkpoint whose checksums are right; move damaged ones aside, and report them by `say`.

    Returns:
        None: there is no checkpoint at all.

    Raises:
        ConfigError: all are damaged; nothing is moved.
        FormatError: a newer version wrote one of the checkpoints.
    """
    damaged = unreadable(_folders(folder))
    for found in reversed(saved_checkpoints(folder)):
        try:
            check_files(found.path, found.state)
        except DamagedError as damage:
            damaged[found.path] = damage
            continue
        for path, damage in damaged.items():
            say(_put_aside(path, damage))
        return found
    if damaged:
        raise all_damaged(folder, damaged)
    return None


def _folders(folder: Path) -> list[Path]:
    return [
        path
        for kind in (Adapter, AllWeights)
        for path in [*folder.glob(f"{kind.step_prefix}*"), folder / kind.final_name]
        if (path / STATE_FILE).is_file()
    ]


def _put_aside(path: Path, damage: DamagedError) -> str:
    """Rename a damaged checkpoint, so that the run does not overwrite it, and return the message about it."""
    aside = path.with_name(f"{DAMAGED_PREFIX}{path.name}")
    if aside.exists():
        shutil.rmtree(aside)
    path.rename(aside)
    return (
        f"CHECKPOINT DAMAGED: {path}: {damage}. It is now {aside.name}, and the newest whole one before it is taken. "
        "The rollout API does not serve batches again that were acknowledged since then"
    )


def said_of(found: Found) -> str:
    """Return one line about the resumed checkpoint."""
    progress, files = found.state.progress, found.state.files
    age = duration(max(0.0, time.time() - found.state.saved_at))
    size = sum(size for size, _ in files.values()) / 1e6
    return (
        f"resumed {found.path}: step {progress.step}, policy version {progress.policy_version}, saved {age} ago, "
        f"{len(files)} files, {size:.1f} MB, checksums right"
    )
