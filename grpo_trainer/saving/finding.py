"""The checkpoints in a folder, and which of them to go on from."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from grpo_trainer.metrics.remaining import duration
from grpo_trainer.model.policy import Adapter, AllWeights
from grpo_trainer.saving.manifest import STATE_FILE, DamagedError, State, check_files, read_state

DAMAGED_PREFIX = "damaged_"


@dataclass(frozen=True)
class Found:
    """A folder with a state.json."""

    path: Path
    state: State


def saved_checkpoints(folder: Path) -> list[Found]:
    """Those whose state.json can be read, of any kind, the final ones among them, oldest first."""
    found = []
    for path in _folders(folder):
        try:
            found.append(Found(path, read_state(path)))
        except DamagedError:
            continue  # found again, and said, when somebody wants to go on from it
    return sorted(found, key=lambda one: (one.state.progress.step, one.path))


def newest_whole(folder: Path, say: Callable[[str], None]) -> Found | None:
    """The newest checkpoint whose files are as they were written; those that are not are put aside, and `say` tells."""
    for path in _folders(folder):
        try:
            read_state(path)
        except DamagedError as damage:
            say(_put_aside(path, damage))
    for found in reversed(saved_checkpoints(folder)):
        try:
            check_files(found.path, found.state)
            return found
        except DamagedError as damage:
            say(_put_aside(found.path, damage))
    return None


def _folders(folder: Path) -> list[Path]:
    return [
        path
        for kind in (Adapter, AllWeights)
        for path in [*folder.glob(f"{kind.step_prefix}*"), folder / kind.final_name]
        if (path / STATE_FILE).is_file()
    ]


def _put_aside(path: Path, damage: DamagedError) -> str:
    """Out of the way of what the run writes, but not away: somebody may want to look. Returns what to say of it."""
    aside = path.with_name(f"{DAMAGED_PREFIX}{path.name}")
    if aside.exists():
        shutil.rmtree(aside)
    path.rename(aside)
    return (
        f"CHECKPOINT DAMAGED: {path}: {damage}. It is now {aside.name}, and the newest whole one before it is taken. "
        "Batches that were acknowledged since then do not come again: others do"
    )


def said_of(found: Found) -> str:
    """Return in one line what is resumed."""
    progress, files = found.state.progress, found.state.files
    age = duration(max(0.0, time.time() - found.state.saved_at))
    size = sum(size for size, _ in (files or {}).values()) / 1e6
    verified = "no checksums in it" if files is None else f"{len(files)} files, {size:.1f} MB, checksums right"
    return (
        f"resumed {found.path}: step {progress.step}, policy version {progress.policy_version}, saved {age} ago, "
        f"{verified}"
    )
