"""Main memory that this process may use: the machine's, or its container's. Needs no torch.

A container's limit is that of a control group (cgroup, `man 7 cgroups`), of version 2 or 1. Control groups are nested,
and each limits everything in it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

ROOT = Path("/")


@dataclass(frozen=True)
class MainMemory:
    """Main memory in bytes: the total, and the part that can be allocated now without swapping or being killed."""

    total: int
    available: int


_Files = tuple[str, str, str]
"""Files of a group: with its limit, with its use; and the entry of memory.stat for pages that are reclaimed first."""
_V2: _Files = ("memory.max", "memory.current", "inactive_file")
_V1: _Files = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


def main_memory(root: Path = ROOT) -> MainMemory:
    """Return the smallest of the machine's memory and the limits of this process's control groups.

    Args:
        root: folder that contains `proc` and `sys`.
    """
    machine = psutil.virtual_memory()
    found = [MainMemory(machine.total, machine.available)]
    found += [group for folder, files in _groups(root) if (group := _of_group(folder, files)) is not None]
    return MainMemory(min(each.total for each in found), min(each.available for each in found))


def _groups(root: Path) -> Iterator[tuple[Path, _Files]]:
    """Yield the folders of this process's groups and of their parents."""
    listed = root / "proc/self/cgroup"
    if not listed.is_file():
        return
    mount = root / "sys/fs/cgroup"
    for line in listed.read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            top, files = mount, _V2
        elif "memory" in controllers.split(","):
            top, files = mount / "memory", _V1
        else:
            continue
        own = top / path.lstrip("/")  # in a container, this may be the machine's path, which does not exist there
        yield from ((folder, files) for folder in (own, *own.parents) if folder.is_relative_to(top))


def _of_group(folder: Path, files: _Files) -> MainMemory | None:
    """Return a group's memory; None: it has no limit."""
    *numbers, reclaimable = files
    limit, used = (_number(folder / name) for name in numbers)
    if limit is None:
        return None
    stat = folder / "memory.stat"
    entries = dict(line.split() for line in stat.read_text().splitlines()) if stat.is_file() else {}
    held = max(0, (used or 0) - int(entries.get(reclaimable, 0)))
    return MainMemory(limit, max(0, limit - held))


def _number(file: Path) -> int | None:
    """Return the number in a file; None: there is no such file, or it says `max`."""
    text = file.read_text().strip() if file.is_file() else ""
    return int(text) if text.isdecimal() else None
